"""Five digits, sorted in more ways than one, then a reward for one of them: SFT and GRPO on three seeds."""

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


def supervised_then_reinforced(name: str, output: Path, seed: int) -> tuple[list[dict[str, float]], ...]:
    """The evaluations of `sft/NAME`, and those of `ar/NAME` on the model that it made."""
    base, supervised = evaluations(f"sft/{name}", output, f"run.seed={seed}")
    export_run(base, output / "base")
    _, reinforced = evaluations(f"ar/{name}", output, f"run.seed={seed}", f"model.checkpoint={output / 'base'}")
    return supervised, reinforced


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reinforcement_picks_the_wanted_half_of_what_supervision_left_open(seed: int, tmp_path: Path) -> None:
    supervised, reinforced = supervised_then_reinforced("sort", tmp_path, seed)
    assert supervised[0]["eval/exact"] < 0.05
    assert 0.3 < supervised[-1]["eval/exact"] < 0.55
    # Of 6 tokens with one bit of direction, ln 2 / 6 = 0.116 nats a token cannot be learnt.
    assert 0.11 < supervised[-1]["eval/loss"] < 0.18
    assert reinforced[0]["eval/exact"] == supervised[-1]["eval/exact"]
    assert reinforced[-1]["eval/exact"] >= 0.75


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reinforcement_finds_what_supervision_never_taught_as_the_likeliest_answer(seed: int, tmp_path: Path) -> None:
    """Of the examples, 14.5 % are right. The likeliest answer after SFT is wrong; one sample in nine is right."""
    supervised, reinforced = supervised_then_reinforced("sort_all", tmp_path, seed)
    assert supervised[-1]["eval/exact"] < 0.03
    assert 0.05 < reinforced[0]["eval/exact"] < 0.2
    assert reinforced[-1]["eval/exact"] >= 0.5
