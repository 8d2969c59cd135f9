"""What the documentation shows is true: its Python runs, its links lead somewhere, the modules that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from unirl.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLE_MODULE = "documented_example"


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> str:
    """All Python of a page as one script, at its lines of the page, so that a traceback points there."""
    script, python = [], False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            python = line == "```python"
            script.append("")
        else:
            script.append(line if python else "")
    return "\n".join(script)


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page).strip()], ids=_name)
def test_the_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(EXAMPLE_MODULE)
    monkeypatch.setitem(sys.modules, EXAMPLE_MODULE, module)  # dataclasses look their module up
    exec(compile(_blocks(page), str(page), "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_files_and_recipes_that_a_page_names_exist(page: Path) -> None:
    folders = {entry.name: base for base in (ROOT, ROOT / "unirl") for entry in base.iterdir()}
    folders |= dict.fromkeys(("ar", "diffusion", "sft"), ROOT / "unirl" / "recipes")
    metrics = re.findall(r"^(\w+/\w+) ", (ROOT / "docs" / "metrics.md").read_text("utf-8"), flags=re.MULTILINE)
    named = [name for name in re.findall(r"`([\w.]+/[\w./]*)`", page.read_text("utf-8")) if name not in metrics]
    paths = [folders[path.partition("/")[0]] / path for path in named if path.partition("/")[0] in folders]
    assert [path for path in paths if not (path.exists() or path.with_suffix(".yaml").exists())] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "recipes.md"], ids=_name)
def test_the_recipe_that_a_page_writes_is_accepted(page: Path, tmp_path: Path) -> None:
    for name, content in re.findall(r"```\w+\n# ([\w.]+)[^\n]*\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL):
        (tmp_path / name).write_text(content)
    [recipe] = tmp_path.glob("*.yaml")
    command = [sys.executable, "-m", "unirl.cli", "check", recipe.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (f"ok: {recipe.name}\n", "")


def test_the_readme_lists_every_command() -> None:
    listed = re.findall(r"^\| `unirl ([\w-]+)", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert listed == list(COMMANDS)
