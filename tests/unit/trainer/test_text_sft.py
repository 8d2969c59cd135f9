from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from unirl.config.error import ConfigError
from unirl.config.run import load_recipe
from unirl.observability.metrics import read
from unirl.trainer.text_sft import TextSFTConfig, TextSFTTrainer

SMALL = ("model.layers=1", "model.heads=2", "model.width=16", "run.seed=0", "run.steps=2", "logging.trackers=[]")
ROWS = [("1+1=", "2"), ("2+2=", "4"), ("what is three and four?", "seven"), ("a", "b" * 30)]


def recipe(*overrides: str) -> TextSFTConfig:
    return load_recipe("sft/sort", [*SMALL, "data.batch_size=2", *overrides])


def with_rows(folder: Path, *overrides: str, evaluation: str = "null") -> TextSFTConfig:
    """A run on ROWS."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in ROWS)
    )
    source = f"{{_target_: unirl.data.conversations.JsonConversations, path: {folder}/rows.jsonl}}"
    (folder / "mine.yaml").write_text(
        "defaults: [/base@_global_: text_sft, /model: tiny_lm, _self_]\n"
        "run: {name: run}\n"
        f"data: {{records: {source}}}\n"
        "train: {backend: {}}\n"
        f"eval: {evaluation.replace('SOURCE', source)}\n"
    )
    return load_recipe(str(folder / "mine.yaml"), [*SMALL, f"run.output={folder}", "data.batch_size=2", *overrides])


def evaluated(config: TextSFTConfig) -> list[dict[str, Any]]:
    run = TextSFTTrainer(config).fit()
    return [line for line in read(run / "metrics.jsonl") if "eval/loss" in line]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.batch_size=0", "batch_size=0 does not fit the conversations there are: take 1 to 10000"),
        ("data.batch_size=10001", "batch_size=10001 does not fit the conversations there are: take 1 to 10000"),
        ("train.geometry.num_updates_per_batch=2", "num_updates_per_batch at 1, got 2"),
        ("train.geometry.micro_batch_size=4", "does not divide into micro_batch_size=4"),
        ("data.limit={too_long: drop}", "too_long=drop needs max_tokens"),
        ("data.limit={too_long: cut, max_tokens: 9}", "unknown value 'cut'"),
        ("~eval.reward", "prompts are sampled and a reward scores the samples: give both, or neither"),
        (
            "eval.reward.scorers={loss: {scorer: {_target_: unirl.reward.scorers.exact_match.ExactMatch}}}",
            "scorers named",
        ),
        ("model=tiny_sd3", "is not a LanguageFamily"),
        ("run.keep_best=1", "but with run.save_every=125 and eval.every=3 most are not"),
        ("algorithm.horizon=3", "horizon goes with aggregation=seq-mean-token-sum-norm"),
    ],
)
def test_a_recipe_that_could_not_run_is_refused_with_the_reason(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe("eval.every=3", override)
    assert told in str(caught.value)


def test_an_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    for evaluation, told in (
        ("{every: 1}", "there is nothing to evaluate"),
        ("{records: SOURCE, pass_at: [1]}", "pass_at tell of samples, and there are none"),
    ):
        with pytest.raises(ConfigError, match=told):
            with_rows(tmp_path, evaluation=evaluation)
    with pytest.raises(ConfigError, match=r"run\.keep_best=1 compares checkpoints by eval/reward"):
        with_rows(tmp_path, "run.keep_best=1", evaluation="{records: SOURCE}")


def test_the_held_out_loss_is_measured_without_prompts_or_reward(tmp_path: Path) -> None:
    first, last = evaluated(with_rows(tmp_path, evaluation="{records: SOURCE, every: 2}"))
    assert (first["step"], last["step"]) == (0, 2)
    assert last["eval/loss"] < first["eval/loss"]
    for line in (first, last):
        assert line["eval/perplexity"] == pytest.approx(math.exp(line["eval/loss"]), rel=1e-6)
        assert "eval/reward" not in line


def test_the_loss_of_the_ema_is_shown_where_there_is_one(tmp_path: Path) -> None:
    kept = "train.backend.ema={decay: 0.999999, warmup: constant}"  # hardly moves
    first, last = evaluated(with_rows(tmp_path, kept, evaluation="{records: SOURCE, every: 2}"))
    assert last["eval/loss"] == pytest.approx(first["eval/loss"], rel=1e-5)


def test_conversations_that_are_too_long_are_refused_dropped_or_truncated_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="2 of 4 conversations have more than max_tokens=10 tokens, conversation 3"):
        TextSFTTrainer(with_rows(tmp_path, "data.limit={max_tokens: 10}")).fit()
    with caplog.at_level(logging.WARNING):
        TextSFTTrainer(with_rows(tmp_path, "data.limit={max_tokens: 10, too_long: drop}", "run.name=drop")).fit()
    assert "data.records: 2 of 4 conversations are too long: dropped" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        TextSFTTrainer(with_rows(tmp_path, "data.limit={max_tokens: 10, too_long: truncate}", "run.name=cut")).fit()
    assert "data.records: 1 of 4 conversations are too long: dropped" in caplog.text
    assert "data.records: 1 of 3 conversations are truncated" in caplog.text
    few = with_rows(tmp_path, "data.limit={max_tokens: 2, too_long: drop}", "run.name=few")
    with pytest.raises(ConfigError, match=r"data\.records: each conversation has more than max_tokens=2 tokens"):
        TextSFTTrainer(few).fit()
    two = with_rows(tmp_path, "data.limit={max_tokens: 10, too_long: drop}", "data.batch_size=3", "run.name=two")
    with pytest.raises(ConfigError, match="batch_size=3 does not fit the 2 conversations: take 1 to 2"):
        TextSFTTrainer(two).fit()


def test_a_conversation_longer_than_the_models_context_is_refused_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ROWS have 6, 6, 29 and 32 tokens."""
    told = r"data\.records: 1 of 4 conversations have more than the model's context of 31 tokens, conversation 4 has 32"
    with pytest.raises(ConfigError, match=told):
        TextSFTTrainer(with_rows(tmp_path, "model.context=31")).fit()
    drop = "data.limit={max_tokens: 99, too_long: drop}"
    with caplog.at_level(logging.WARNING):
        TextSFTTrainer(with_rows(tmp_path, "model.context=31", drop, "run.name=drop")).fit()
    assert "data.records: 1 of 4 conversations are too long: dropped" in caplog.text


def test_held_out_conversations_that_are_trained_are_told_of_unless_they_are_all_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = with_rows(tmp_path, evaluation="{records: SOURCE}")
    (tmp_path / "held_out.jsonl").write_text(
        '{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+1=", "response": "3"}\n'
    )
    other = with_rows(tmp_path, f"eval.records.path={tmp_path}/held_out.jsonl", evaluation="{records: SOURCE}")
    with caplog.at_level(logging.WARNING):
        TextSFTTrainer(same).load()
        assert caplog.text == ""
        TextSFTTrainer(other).load()
    assert "eval.records: 1 of 2 are trained on as well, such as '1+1=': figures of these are not held" in caplog.text


def test_a_prompt_of_an_evaluation_that_does_not_fit_stops_a_run_before_its_first_step(tmp_path: Path) -> None:
    prompts = "{_target_: unirl.data.prompts.ListedPrompts, prompts: [a]}"
    reward = "{scorers: {short: {scorer: {_target_: unirl.reward.scorers.length.Length, most: 3}}}}"
    config = with_rows(tmp_path, evaluation=f"{{prompts: {prompts}, reward: {reward}}}")
    with pytest.raises(ConfigError, match="max_new_tokens=256 more it does not fit the model's context of 256"):
        TextSFTTrainer(config).fit()


def test_a_geometry_changes_no_metric_of_a_run(tmp_path: Path) -> None:
    whole = read(TextSFTTrainer(with_rows(tmp_path, "run.name=whole")).fit() / "metrics.jsonl")
    cut = with_rows(tmp_path, "run.name=cut", "train.geometry={token_budget: 12}")
    for one, other in zip(whole, read(TextSFTTrainer(cut).fit() / "metrics.jsonl"), strict=True):
        names = [name for name in one if not name.startswith("seconds/")]
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-4)
