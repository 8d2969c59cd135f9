"""Runs of two ranks that lose some of them, are stopped or killed: the numbers stay, and nothing else stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import assert_equal, metrics, overrides, state
from unirl.config.run import load_recipe
from unirl.trainer.diffusion import DiffusionTrainer

pytestmark = pytest.mark.ray

TWO = "placement={launcher: ray, device: cpu, devices: 2, deadline: 400}"


def two_ranks(
    output: Path, *, steps: int = 6, dying: str = "chance: 0", settings: tuple[str, ...] = ()
) -> DiffusionTrainer:
    """The digits run on two ranks; dying: fields of its DyingJudge, which counts its calls beside the run."""
    judge = f"{{_target_: tests.dying.DyingJudge, folder: {output / 'deaths'}, {dying}}}"
    changed = [*overrides("flow_grpo", output, steps=steps), TWO, f"reward.scorers.digit.scorer={judge}", *settings]
    return DiffusionTrainer(load_recipe("diffusion/digits", changed))


def told(output: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times and the count of restarts."""
    return [{name: value for name, value in line.items() if name != "run/restarts"} for line in metrics(output)]


@pytest.mark.timeout(600)
def test_a_run_that_loses_a_rank_goes_on_with_the_numbers_of_one_process(
    ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiffusionTrainer(load_recipe("diffusion/digits", overrides("flow_grpo", tmp_path / "single"))).fit()
    two_ranks(tmp_path / "lossy", dying="at_calls: [9]").fit()
    assert "slab main lost rank" in caplog.text
    assert "in RewardService.score" in caplog.text
    assert metrics(tmp_path / "lossy")[-1]["run/restarts"] == 1
    for lossy, single in zip(told(tmp_path / "lossy"), metrics(tmp_path / "single"), strict=True):
        known = {name: value for name, value in single.items() if value is not None}
        assert lossy.keys() == single.keys()
        assert {name: lossy[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_soak_of_200_steps_under_random_kills_ends_bit_equal_to_a_quiet_one(ray: None, tmp_path: Path) -> None:
    settings = ("run.save_every=5", "run.max_restarts=20", "eval.every=50")
    two_ranks(tmp_path / "quiet", steps=200, settings=settings).fit()
    two_ranks(tmp_path / "lossy", steps=200, dying="chance: 0.02", settings=settings).fit()
    assert metrics(tmp_path / "lossy")[-1]["run/restarts"] >= 3
    assert told(tmp_path / "lossy") == told(tmp_path / "quiet")
    lossy, quiet = ({k: v for k, v in state(tmp_path / name).items() if k != "rng"} for name in ("lossy", "quiet"))
    assert_equal(lossy, quiet)
