"""A run whose reward comes over HTTP is the run whose reward is its own."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import assert_equal, metrics, overrides, state
from tests.unit.reward.http.live import live
from unirl.config.run import load_recipe
from unirl.reward.scorers.digits import DigitJudge
from unirl.trainer.domains import trainer_of


def run(output: Path, *more: str) -> None:
    trainer_of(load_recipe("diffusion/digits", [*overrides("flow_grpo", output, steps=3), *more])).fit()


def test_metrics_and_weights_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    run(tmp_path / "local")
    with live({"digit": DigitJudge()}) as url:
        remote = f"{{_target_: unirl.reward.scorers.remote.RemoteScorer, server: {{urls: ['{url}']}}, scorer: digit}}"
        run(tmp_path / "remote", f"reward.scorers.digit.scorer={remote}")
    assert url in (tmp_path / "remote" / "run" / "config.yaml").read_text()
    assert len(metrics(tmp_path / "local")) >= 3
    assert metrics(tmp_path / "remote") == metrics(tmp_path / "local")
    assert_equal(state(tmp_path / "remote"), state(tmp_path / "local"))
