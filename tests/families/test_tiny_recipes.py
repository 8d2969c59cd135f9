"""Every family's tiny recipe, as `unirl train` runs it: random weights, three steps, nothing to download."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.integration.runs import metrics, state
from unirl import cli
from unirl.config.recipes import shipped_recipes
from unirl.config.run import load_recipe
from unirl.models.catalogue import families
from unirl.models.tiny import TinySD3

RECIPES = [recipe for recipe in shipped_recipes() if recipe.startswith("diffusion/tiny_")]


def test_every_family_has_one() -> None:
    assert {type(load_recipe(recipe).model) for recipe in RECIPES} == {*families().values()} - {TinySD3}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_from_a_cache_that_is_empty(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = [f"run.output={tmp_path}", "run.name=run", "run.seed=0", "logging.trackers=[]"]
    assert cli.main(["train", recipe, *settings]) == 0
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    for line in lines[1:]:
        assert (line["reward/invalid"], line["train/skipped"]) == (0, 0)
        assert line["reward/group_std"] > 0
    # The second factor of an adapter starts at zero.
    seconds = {name: value for name, value in state(tmp_path)["parameters"].items() if "lora_B" in name}
    moved = [name for name, value in seconds.items() if value.any()]
    assert len(moved) > len(seconds) / 2
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "samples" / "before_after.png").is_file()
