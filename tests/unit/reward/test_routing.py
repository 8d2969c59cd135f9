"""Scorers that are for some prompts only: what they are asked, the reward of the others, and what advantages see."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.unit.reward.samples import Rule, accepted, answered, generated, level_of, service
from unirl.config.error import ConfigError
from unirl.config.load import dump, load
from unirl.data.prompts import FilePrompts, PromptRow
from unirl.models.tiny_language import TinyLM
from unirl.reward.scorers.arithmetic import Arithmetic
from unirl.reward.scorers.exact_match import ExactMatch
from unirl.reward.scorers.json_valid import JsonValid
from unirl.reward.scorers.math_answer import MathAnswer
from unirl.reward.scorers.multiple_choice import MultipleChoice
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.trainer.rl import AdvantageConfig, reward_metrics
from unirl.trainer.run import RunConfig
from unirl.trainer.text_evaluation import TextEvalConfig
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams

COUNT, COLOUR = {"skill": "count"}, {"skill": "colour"}
LENGTH = "unirl.reward.scorers.length.Length"


def level(**settings: Any) -> WeightedScorer:
    return WeightedScorer(Rule(level_of), **settings)


def squared(**settings: Any) -> WeightedScorer:
    return WeightedScorer(Rule(lambda sample: level_of(sample) ** 2), **settings)


def test_a_scorer_is_asked_about_its_prompts_only_and_the_total_goes_without_it_elsewhere():
    seen = []
    counts = WeightedScorer(Rule(lambda s: seen.append(s.id) or 10.0), weight=0.5, when={"skill": "count"})
    scores = service(all=level(weight=2.0), counts=counts).score(generated(["a", "b"], 2, [COLOUR, COUNT]))
    assert seen == ["r0.p1/0", "r0.p1/1"]
    assert scores.total.tolist() == [0.0, 2.0, 9.0, 11.0]
    assert scores.components["all"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert scores.components["counts"].isnan().tolist() == [True, True, False, False]
    assert scores.valid.all()
    assert scores.causes == [""] * 4


def test_a_batch_without_any_of_its_prompts_does_not_call_it():
    def fail(_: object) -> float:
        raise AssertionError("called")

    never = WeightedScorer(Rule(fail), when={"skill": "count"})
    assert service(all=level(), never=never).score(generated(["a"] * 3, 1, [COLOUR] * 3)).total.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("when", "metadata", "applies"),
    [
        ({}, {}, True),
        ({"skill": "count"}, COUNT, True),
        ({"skill": "count"}, COLOUR, False),
        ({"skill": "count"}, {}, False),
        ({"skill": ("count", "colour")}, COLOUR, True),
        ({"skill": "count", "n": 2}, {"skill": "count", "n": 2}, True),
        ({"skill": "count", "n": 2}, {"skill": "count", "n": 3}, False),
        ({"n": 1}, {"n": 1.0}, True),
        ({"n": 1}, {"n": True}, False),
        ({"n": True}, {"n": 1}, False),
        ({"n": (1, "true")}, {"n": True}, False),
        ({"n": 1}, {"n": "1"}, False),
        ({"n": 1}, {"n": [1]}, False),
    ],
)
def test_a_prompt_has_one_of_the_values_under_every_key(when, metadata, applies):
    assert level(when=when).applies(metadata) is applies


def test_a_failure_counts_where_the_scorer_applies_and_nowhere_else():
    fails = WeightedScorer(Rule(lambda _: math.nan), when={"skill": "count"})
    scores = accepted(service(0.5, all=level(), fails=fails), generated(["a", "b"], 1, [COLOUR, COUNT]))
    assert scores.valid.tolist() == [True, False]
    assert scores.causes == ["", "fails: r0.p1/0: the score is nan (prompt 'b')"]


def test_a_broken_picture_is_invalid_where_only_some_scorers_apply():
    sample = generated(["a", "b"], 1, [COLOUR, COUNT])
    images = torch.zeros(2, 3, 4, 4)
    images[0, 0, 0, 0] = math.inf
    part = dataclasses.replace(sample.frontier, media=Media(images=images))
    judge = service(colour=level(when={"skill": "colour"}), count=level(when={"skill": "count"}))
    scores = judge.score(sample.with_frontier(part))
    assert scores.valid.tolist() == [False, True]
    assert scores.causes[0] == "r0.p0/0: the picture is not finite"


def test_a_sample_without_a_scorer_is_refused_and_has_no_reward_of_0():
    judge = service(count=level(when={"skill": "count"}), seen=level(required=False))
    with pytest.raises(
        ValueError, match=r"no scorer that counts in the reward applies to the prompt 'b' with metadata"
    ):
        judge.score(generated(["a", "b"], 1, [COUNT, COLOUR]))


# --- advantages ---


def scored(combine: Literal["weighted_sum", "per_component"], **scorers: WeightedScorer) -> tuple[Part, RewardConfig]:
    """Levels 0 .. 3: the group `count` has 0 and 1, the group `colour` 2 and 3."""
    judge = RewardService(RewardConfig(scorers))
    part = (sample := generated(["a", "b"], 2, [COUNT, COLOUR])).frontier.with_rewards(judge.score(sample))
    return AdvantageConfig(combine=combine, eps=0.0, scale="group_std").of(part, judge.config), judge.config


def test_each_component_is_normalised_where_it_applies_and_adds_nothing_elsewhere():
    """Group count: level alone, -1 and 1. Group colour: level gives -1 and 1, 3 - level^2 (5 and 9) gives -1 and 1."""
    part, _ = scored("per_component", level=level(weight=2.0), squared=squared(weight=-0.5, when={"skill": "colour"}))
    assert part.advantages is not None
    torch.testing.assert_close(part.advantages, torch.tensor([-2.0, 2.0, -1.5, 1.5]), atol=1e-6, rtol=0)


def test_the_weighted_sum_is_normalised_group_by_group():
    """Group colour: 2 * 2 - 0.5 * 4 = 2 and 2 * 3 - 0.5 * 9 = 1.5."""
    part, _ = scored("weighted_sum", level=level(weight=2.0), squared=squared(weight=-0.5, when={"skill": "colour"}))
    assert part.rewards is not None
    assert part.rewards.tolist() == [0.0, 2.0, 2.0, 1.5]
    assert part.advantages is not None
    torch.testing.assert_close(part.advantages, torch.tensor([-1.0, 1.0, 1.0, -1.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("scope", "scale"), [("global", "group_std"), ("group", "global_std")])
def test_statistics_over_the_batch_see_only_the_rows_of_the_scorer(scope, scale):
    """Of level^2 there are 4 and 9: mean 6.5, deviation 2.5. With two zeros for the absent rows it would be 3.7."""
    judge = service(level=level(weight=0.0), some=squared(when={"skill": "colour"}), rest=level(when=COUNT))
    part = (sample := generated(["a", "b"], 2, [COUNT, COLOUR])).frontier.with_rewards(judge.score(sample))
    part = AdvantageConfig(combine="per_component", eps=0.0, scope=scope, scale=scale).of(part, judge.config)
    assert part.advantages is not None
    torch.testing.assert_close(part.advantages, torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-6, rtol=0)


# --- figures ---


def test_the_figure_of_a_scorer_is_over_the_rows_it_applied_to():
    part, config = scored("weighted_sum", level=level(), some=squared(when={"skill": "colour"}))
    metrics = reward_metrics(part, config.absent(part.metadata))
    found = values(metrics)
    assert (found["reward/level"], found["reward/some"]) == (1.5, 6.5)
    assert (metrics["reward/some"].weight, found["reward/invalid"]) == (2.0, 0.0)


def test_a_scorer_that_applied_to_no_row_of_a_step_has_no_figure():
    part, config = scored("weighted_sum", level=level(), some=squared(when={"skill": "text"}))
    assert config.absent(part.metadata) == ["some"]
    found = values(reward_metrics(part, config.absent(part.metadata)))
    assert "reward/some" not in found
    assert found["reward/level"] == 1.5


# --- refusals ---

ROWS = (PromptRow("two cats", {"skill": "count", "n": 2}), PromptRow("a red cat", {"skill": "colour"}))


def test_a_prompt_that_no_counting_scorer_is_for_is_named():
    config = RewardConfig({"count": level(when={"skill": "count"}), "seen": level(weight=0.0), "log": level()})
    config.refuse_unscored(ROWS)
    only = dataclasses.replace(config, scorers={name: config.scorers[name] for name in ("count", "seen")})
    with pytest.raises(
        ValueError, match=r"'a red cat' with metadata \{'skill': 'colour'\}: they are for \{'count': \{"
    ):
        only.refuse_unscored(ROWS)


@pytest.mark.parametrize(
    ("when", "told"),
    [
        ({"skill": "counting"}, r"is for prompts with \{'skill': 'counting'\}.*There is skill: 'count', 'colour'$"),
        ({"skil": "count"}, r"There is skil: None$"),
        ({"skill": "colour", "n": 2}, r"There is skill: 'count', 'colour'; n: 2, None$"),
    ],
)
def test_a_scorer_that_is_for_no_prompt_is_named_with_what_there_is(when, told):
    config = RewardConfig({"all": level(), "idle": level(when=when)})
    with pytest.raises(ValueError, match=told):
        config.refuse_idle(ROWS)


def test_a_recipe_says_for_which_prompts_strictly():
    recipe = {
        "scorers": {"r": {"scorer": {"_target_": LENGTH, "least": 1}, "when": {"skill": ["count", 2], "hard": True}}}
    }
    config = load(RewardConfig, recipe)
    assert config.scorers["r"].when == {"skill": ("count", 2), "hard": True}
    assert load(RewardConfig, dump(config)) == config
    for wrong, told in (
        ([], "when.skill is an empty list"),
        ({"a": 1}, "when.skill: expected true or false or an int"),
        (None, "when.skill: expected true or false or an int"),
        ([["count"]], r"when.skill: expected true or false or an int"),
    ):
        recipe["scorers"]["r"]["when"] = {"skill": wrong}
        with pytest.raises(ConfigError, match=told):
            load(RewardConfig, recipe)


def test_texts_are_routed_as_pictures_are():
    long, short = (WeightedScorer(Rule(lambda s: len(s.written)), when={"n": n}) for n in (1, 2))
    scores = service(long=long, short=short).score(answered(["abc", "de"], [{"n": 1}, {"n": 2}]))
    assert scores.total.tolist() == [3.0, 2.0]


def rows_of(folder: Path, *rows: dict[str, Any]) -> FilePrompts:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FilePrompts(file)


@pytest.mark.parametrize(
    ("scorer", "row", "told"),
    [
        (ExactMatch(), {"anser": "2"}, "metadata has no 'answer', only ['anser']: name the right key"),
        (ExactMatch(), {"answer": " "}, "the answer ' ' is empty once normalised"),
        (ExactMatch(), {"answer": None}, "must be text, a whole number or a list of these, got None"),
        (ExactMatch(), {"answer": 2.5}, "must be text, a whole number or a list of these, got 2.5"),
        (MultipleChoice(), {"answer": "E"}, "must be one letter of ABCD, got 'E'"),
        (MathAnswer(), {"answer": ""}, "the gold answer is empty"),
        (MathAnswer(), {"answer": True}, "must be a number or text, got True"),
        (Arithmetic(), {"prompt": "1 + 1, or 2 + 2?"}, "holds 2 expressions"),
        (Arithmetic("sum"), {"sum": "1 / 0"}, "'1 / 0' has no value"),
        (JsonValid(schema_key="schema"), {}, "metadata has no 'schema'"),
    ],
)
def test_a_row_of_which_no_text_could_be_scored_is_named_with_its_file_and_number(scorer, row, told, tmp_path):
    good = {"answer": "B", "schema": {}, "sum": "2", "prompt": "1 + 1?"}
    source = rows_of(tmp_path, good, {"prompt": "what?", **row}, {**good, "skill": "count"})
    config = RewardConfig({"right": WeightedScorer(scorer)})
    config.refuse_rows(source.rows()[::2], source.origin)
    with pytest.raises(ValueError, match=r"1 bad rows in all: mend them, or keep the scorer from .* `when`$") as caught:
        config.refuse_rows(source.rows(), source.origin)
    prompt = row.get("prompt", "what?")
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl: prompt 2, {prompt!r}: scorer right: ")
    assert told in str(caught.value)


def test_rows_that_a_scorer_does_not_apply_to_and_scorers_that_do_not_count_are_free(tmp_path):
    source = rows_of(tmp_path, {"prompt": "a", "skill": "count", "answer": "2"}, {"prompt": "b"})
    exact = WeightedScorer(ExactMatch(), when={"skill": "count"})
    logged = WeightedScorer(ExactMatch(), required=False)
    RewardConfig({"exact": exact, "logged": logged, "all": level()}).refuse_rows(source.rows(), source.origin)


def test_rows_of_an_evaluation_are_checked_as_well(tmp_path):
    source = rows_of(tmp_path, {"prompt": "a", "answer": "2"}, {"prompt": "b"})
    reward = RewardConfig({"exact": WeightedScorer(ExactMatch())})
    with pytest.raises(ValueError, match=r"rows.jsonl: prompt 2, 'b': scorer exact: the row: metadata has no 'answer'"):
        TextEvalConfig(source).check(TinyLM(), ARSamplingParams(max_new_tokens=1), reward, RunConfig("x", 1, 0))
