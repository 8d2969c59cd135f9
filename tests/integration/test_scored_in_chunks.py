"""A run that scores its rollouts in chunks is the run that scores them whole, where both cut forwards alike."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import RECIPES, assert_equal, metrics, overrides, state
from tests.unit.reward.http.live import live
from unirl.config.run import load_recipe
from unirl.reward.scorers.digits import DigitJudge
from unirl.trainer.domains import trainer_of


def run(kind: str, output: Path, *more: str) -> None:
    """Four prompts of four samples a step, in four forwards."""
    settings = [*overrides(kind, output, steps=3), "rollout.batch_size=4", *more]
    trainer_of(load_recipe(RECIPES[kind][0], settings)).fit()


def assert_same(one: Path, other: Path) -> None:
    assert len(metrics(one)) == 4
    assert metrics(one) == metrics(other)
    assert_equal(state(one), state(other))


def test_pictures_scored_here_and_over_http_give_the_same_run_to_the_last_bit(tmp_path: Path) -> None:
    run("flow_grpo", tmp_path / "whole")
    run("flow_grpo", tmp_path / "local", "data.prompts_per_chunk=1")
    with live({"digit": DigitJudge()}) as url:
        remote = f"{{_target_: unirl.reward.scorers.remote.RemoteScorer, server: {{urls: ['{url}']}}, scorer: digit}}"
        run("flow_grpo", tmp_path / "remote", "data.prompts_per_chunk=3", f"reward.scorers.digit.scorer={remote}")
    assert_same(tmp_path / "local", tmp_path / "whole")
    assert_same(tmp_path / "remote", tmp_path / "whole")


def test_so_do_texts_with_prompts_that_are_drawn_again(tmp_path: Path) -> None:
    run("ar", tmp_path / "whole", "responses.max_draws=1")
    run("ar", tmp_path / "chunks", "responses.max_draws=1", "data.prompts_per_chunk=2")
    assert metrics(tmp_path / "whole")[1]["rollout/extra_draws"] == 1
    assert_same(tmp_path / "chunks", tmp_path / "whole")
