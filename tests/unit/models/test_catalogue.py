"""The catalogue has every family, says what they say, and loads no torch; docs/models.md and the README agree."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from unirl import cli
from unirl.models import catalogue
from unirl.models.diffusion.flux2 import FLUX2, FLUX2Klein
from unirl.models.diffusion.sd3 import SD3
from unirl.models.tiny import TinySD3

ROOT = Path(__file__).parents[3]


def test_it_has_every_family_that_states_facts_and_none_that_is_abstract() -> None:
    found = catalogue.families()
    assert (found["SD3"], found["TinySD3"]) == (SD3, TinySD3)
    assert FLUX2 not in found.values()
    texts = {path.relative_to(ROOT): path.read_text("utf-8") for path in (ROOT / "unirl" / "models").rglob("*.py")}
    stating = {path: text.count("\n    facts: ClassVar[Facts] = ") for path, text in texts.items()}
    files = Counter(Path(*family.__module__.split(".")).with_suffix(".py") for family in found.values())
    assert files == {path: count for path, count in stating.items() if count}


def test_names_differ_in_more_than_capitals() -> None:
    assert len({name.lower() for name in catalogue.families()}) == len(catalogue.families())


def test_the_list_has_each_family_with_its_facts_and_few_of_its_lora_targets() -> None:
    entries = dict(entry.split("\n", 1) for entry in catalogue.overview().rstrip("\n").split("\n\n"))
    assert list(entries) == list(catalogue.families())
    told = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in entries["FLUX2Dev"].splitlines())
    assert told == {
        "makes": "image",
        "parameters": "32.2B, beside a text encoder of 24B",
        "checkpoints": "black-forest-labs/FLUX.2-dev",
        "licence": "FLUX Non-Commercial; gated",
        "guidance": "an input; 4 is usual",
        "blocks to shard": "Flux2TransformerBlock, Flux2SingleTransformerBlock",
        "LoRA targets": "to_q, to_k, to_v, to_out.0 and 5 more",
        "parallel": "context",
        "advice": "source pictures make it an edit",
    }
    assert max(map(len, catalogue.overview().splitlines())) <= 120


def test_settings_are_told_with_their_defaults_as_a_recipe_writes_them() -> None:
    assert catalogue.settings(FLUX2Klein) == [
        ("checkpoint", "str", "required"),
        ("max_sequence_length", "int", "512"),
        ("text_layers", "tuple[int, ...]", "[9, 18, 27]"),
    ]
    assert ("checkpoint", "Path | None", "null") in catalogue.settings(TinySD3)
    assert ("predicts", "Literal['x0', 'velocity']", "x0") in catalogue.settings(TinySD3)


def test_one_family_is_shown_whole_with_what_it_shares() -> None:
    text = catalogue.details("flux2klein")
    assert text.startswith("FLUX2Klein  (unirl.models.diffusion.flux2.FLUX2Klein)\n")
    assert "klein: Qwen3 reads the prompt." in text
    assert "What klein and dev share." in text
    assert all(target in text for target in FLUX2Klein.lora_targets)
    assert re.search(r"^  text_layers +tuple\[int, \.\.\.\]  \[9, 18, 27\]$", text, flags=re.MULTILINE)


def test_a_name_that_is_none_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "SD4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no model family 'SD4'; did you mean SD3")
    assert error.count("\n") == 1


def test_the_command_loads_no_model_library() -> None:
    program = (
        "import sys\nfrom unirl import cli\n"
        "assert [cli.main(['models']), cli.main(['models', 'SD3'])] == [0, 0]\n"
        "heavy = ('torch._C', 'sklearn.base', 'diffusers.utils', 'transformers.utils')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == catalogue.overview() + catalogue.details("SD3") + "[]\n"


def test_the_page_is_what_the_code_says() -> None:
    assert (ROOT / catalogue.PAGE).read_text("utf-8") == catalogue.page(), "write it anew: make docs"


def test_the_readme_counts_and_names_the_families_of_each_kind() -> None:
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    kinds = catalogue.by_kind()
    assert rows == [(kind, str(len(names)), ", ".join(names)) for kind, names in kinds.items()]
