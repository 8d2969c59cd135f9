"""Five digits, up or down at random, then a reward for one way: what SFT and GRPO make of it on three seeds."""

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
def test_reinforcement_picks_the_wanted_half_of_what_supervision_left_open(seed: int, tmp_path: Path) -> None:
    base, supervised = evaluations("sft/sort", tmp_path, f"run.seed={seed}")
    export_run(base, tmp_path / "base")
    settings = (f"run.seed={seed}", f"model.checkpoint={tmp_path / 'base'}")
    _, reinforced = evaluations("ar/sort", tmp_path, *settings)
    assert supervised[0]["eval/exact"] < 0.05
    assert 0.3 < supervised[-1]["eval/exact"] < 0.55
    # Of 6 tokens with one bit of direction, ln 2 / 6 = 0.116 nats a token cannot be learnt.
    assert 0.11 < supervised[-1]["eval/loss"] < 0.18
    assert reinforced[0]["eval/exact"] == supervised[-1]["eval/exact"]
    assert reinforced[-1]["eval/exact"] >= 0.75
