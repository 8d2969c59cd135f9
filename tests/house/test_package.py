"""`pip install unirl` carries every file of the package."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]


def test_every_file_but_modules_and_notes_is_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["unirl"]
    packed = {found.relative_to(ROOT).as_posix() for glob in globs for found in (ROOT / "unirl").glob(glob)}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "unirl"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    data = {path for path in tracked if PurePosixPath(path).suffix not in (".py", ".md") and (ROOT / path).is_file()}
    assert data - packed == set()


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {module.parent for module in (ROOT / "unirl").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
