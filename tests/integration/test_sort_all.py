"""Digits sorted mostly the wrong way and without repeats, then a reward for all of them going up, on three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.config.run import load_recipe
from unirl.observability.metrics import read
from unirl.trainer.domains import trainer_of
from unirl.trainer.restore import export_run

pytestmark = pytest.mark.slow


def evaluations(recipe: str, output: Path, *settings: str) -> tuple[Path, list[dict[str, float]]]:
    """The folder of a run, and the figures of its evaluations."""
    common = [f"run.output={output}", "logging.trackers=[]"]
    run = trainer_of(load_recipe(recipe, [*common, *settings])).fit()
    return run, [line for line in read(run / "metrics.jsonl") if "eval/exact" in line]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reinforcement_finds_what_supervision_never_taught_as_the_likeliest_answer(seed: int, tmp_path: Path) -> None:
    """Of the examples, 14.5 % are right. After SFT the likeliest answer is wrong, and one sample in ten is right."""
    base, supervised = evaluations("sft/sort_all", tmp_path, f"run.seed={seed}")
    export_run(base, tmp_path / "base")
    _, reinforced = evaluations("ar/sort_all", tmp_path, f"run.seed={seed}", f"model.checkpoint={tmp_path / 'base'}")
    assert supervised[-1]["eval/exact"] < 0.03
    assert 0.05 < reinforced[0]["eval/exact"] < 0.2
    assert reinforced[-1]["eval/exact"] >= 0.6
