"""avg@k and pass@k."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from unirl.data.prompts import ListedPrompts
from unirl.reward.scorers.length import Length
from unirl.reward.service import RewardConfig, WeightedScorer
from unirl.trainer.evaluation import Evaluation
from unirl.trainer.text_evaluation import TextEvalConfig, pass_at_k
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sampling import ARSamplingParams

PROMPTS = ListedPrompts(("a", "b"))


@pytest.mark.parametrize(
    ("successes", "k", "expected"),
    [(0, 1, 0.0), (2, 1, 0.5), (4, 1, 1.0), (1, 2, 0.5), (2, 2, 5 / 6), (3, 2, 1.0), (1, 4, 1.0), (0, 4, 0.0)],
)
def test_pass_at_k_of_4_samples_in_numbers(successes: int, k: int, expected: float) -> None:
    assert pass_at_k(torch.tensor([successes]), 4, k).tolist() == pytest.approx([expected])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_it_is_the_share_of_all_subsets_of_k_that_hold_a_success(k: int) -> None:
    for successes in range(6):
        hits = [any(row < successes for row in chosen) for chosen in itertools.combinations(range(5), k)]
        assert float(pass_at_k(torch.tensor([successes]), 5, k)) == pytest.approx(sum(hits) / len(hits))


def test_the_figures_are_means_over_prompts_and_a_sample_without_a_reward_has_failed() -> None:
    """2 of 4 and 0 of 4 (one NaN): pass@1 0.25, pass@2 5/12, pass@4 0.5."""
    config = TextEvalConfig(PROMPTS, samples_per_prompt=4, pass_at=(1, 2, 4), success=0.5)
    total = torch.tensor([1.0, 0.5, 0.49, 0.0, math.nan, 0.0, 0.1, 0.2])
    found = Evaluation({"eval/reward": 0.3}, Media(texts=["x"] * 8), total, ["a", "b"])
    metrics = config.passed(found, Scores(total, {}, [()] * 8)).metrics
    assert metrics == pytest.approx(
        {"eval/reward": 0.3, "eval/pass@1": 0.25, "eval/pass@2": 5 / 12, "eval/pass@4": 0.5}
    )


def test_its_figures_are_those_that_the_best_checkpoint_may_be_chosen_by() -> None:
    reward = RewardConfig({"length": WeightedScorer(Length(least=1))})
    config = TextEvalConfig(PROMPTS, samples_per_prompt=4, pass_at=(1, 4))
    assert config.figures(reward) == ["eval/reward", "eval/length", "eval/pass@1", "eval/pass@4"]


def test_the_temperature_of_an_evaluation_is_that_of_training_or_its_own_and_nothing_else_changes() -> None:
    sampling = ARSamplingParams(max_new_tokens=9, temperature=1.3, top_p=0.9, stop=("x",), seed=4)
    assert TextEvalConfig(PROMPTS).sampled(sampling) == sampling
    greedy = TextEvalConfig(PROMPTS, samples_per_prompt=1, temperature=0.0).sampled(sampling)
    assert greedy == dataclasses.replace(sampling, temperature=0.0)


def test_an_evaluation_has_a_random_stream_of_its_own() -> None:
    sampling = ARSamplingParams(max_new_tokens=9, seed=4)
    asked = TextEvalConfig(PROMPTS, samples_per_prompt=3).request(sampling).frontier
    assert isinstance(asked.sampling, ARSamplingParams)
    assert asked.sampling.seed != 4
    assert len(asked) == 6


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"pass_at=\[0, 8\] cannot be told from samples_per_prompt=4 samples: take 1 to 4"
    ):
        TextEvalConfig(PROMPTS, samples_per_prompt=4, pass_at=(0, 1, 8))
    with pytest.raises(ValueError, match=r"samples_per_prompt=4 at temperature 0 are copies of one text: take 1"):
        TextEvalConfig(PROMPTS, samples_per_prompt=4, temperature=0.0)
