"""A run of a language model fits its algorithm or is refused; dynamic sampling and PPO resume bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import last_state
from tests.tiny_language_policy import SMALL_LM, WRITING
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.ppo import PPO
from unirl.algorithms.token_base import TokenAlgorithm
from unirl.data.prompts import ListedPrompts
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, WeightedScorer
from unirl.train.backend.config import ARBackendConfig
from unirl.trainer.ar import ARConfig, ARTrainConfig, ARTrainer
from unirl.trainer.responses import Overlong, ResponseConfig
from unirl.trainer.rl import AdvantageConfig, DataConfig
from unirl.trainer.run import LoggingConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class Nines(Scorer):
    """1 for a nine in the response: half of small groups have equal rewards."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float("9" in (sample.text or "")) for sample in samples]


REWARD = RewardConfig(scorers={"nines": WeightedScorer(Nines())})
DAPO = ResponseConfig(max_draws=3, overlong=Overlong(buffer=4), mask_truncated=True)


def config(output: Path, algorithm: TokenAlgorithm, *, steps: int = 4, **settings: Any) -> ARConfig:
    critic = algorithm.needs.values is not None
    plain = {
        "run": RunConfig("run", steps=steps, seed=3, output=output, save_every=2),
        "model": SMALL_LM,
        "data": DataConfig(ListedPrompts(("12", "3a0", "7", "45", "6")), prompts_per_step=3, samples_per_prompt=2),
        "sampling": WRITING,
        "reward": REWARD,
        "algorithm": algorithm,
        "train": ARTrainConfig(ARBackendConfig(critic=critic)),
        "logging": LoggingConfig(trackers=()),
    }
    return ARConfig(**{**plain, **settings})


def lines(output: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without its times."""
    written = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds/")} for line in written]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return last_state(output / "run")["parameters"]


@pytest.mark.parametrize(("algorithm", "settings"), [(GRPO(), {"responses": DAPO}), (PPO(), {})], ids=["dapo", "ppo"])
def test_a_run_that_is_continued_ends_as_if_it_had_not_stopped(
    algorithm: TokenAlgorithm, settings: dict[str, Any], tmp_path: Path
) -> None:
    ARTrainer(config(tmp_path / "whole", algorithm, **settings)).fit()
    for steps in (2, 4):
        ARTrainer(config(tmp_path / "halves", algorithm, steps=steps, **settings)).fit()
    assert lines(tmp_path / "halves") == lines(tmp_path / "whole")
    whole, halves = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_the_groups_that_teach_nothing_are_those_whose_places_stayed_open(tmp_path: Path) -> None:
    pairs = DataConfig(ListedPrompts(("12", "3a0", "7", "45")), prompts_per_step=2, samples_per_prompt=3)
    ARTrainer(config(tmp_path, GRPO(), steps=12, data=pairs, responses=ResponseConfig(max_draws=1))).fit()
    steps = lines(tmp_path)[1:]
    assert {step["rollout/extra_draws"] for step in steps} == {0.0, 1.0}
    assert {step["rollout/open_places"] > 0 for step in steps} == {True, False}
    for step in steps:
        assert step["advantage/constant_groups"] * 2 == pytest.approx(step["rollout/open_places"])
        assert step["rollout/equal_groups"] >= step["rollout/open_places"]


def test_extra_draws_have_prompts_and_ids_of_their_own() -> None:
    from unirl.data.prompts import PromptRow, PromptSampler

    sampler = PromptSampler(tuple(PromptRow(str(n)) for n in range(20)), count=4, seed=1)
    first, extra, again = sampler.draw(2), sampler.draw(2, 1, count=3), sampler.draw(2, 1, count=3)
    other = sampler.draw(2, 2)
    assert first.ids == ["r2.p0", "r2.p1", "r2.p2", "r2.p3"]
    assert extra.ids == again.ids == ["r2.p4", "r2.p5", "r2.p6"]
    assert other.ids == ["r2.p8", "r2.p9", "r2.p10", "r2.p11"]
    texts = [part.media.texts for part in (first, extra, again, other) if part.media is not None]
    assert texts[1] == texts[2]
    assert texts[0] != texts[3]


@pytest.mark.parametrize(
    ("algorithm", "settings", "said"),
    [
        (PPO(), {"train": ARTrainConfig(ARBackendConfig())}, "PPO learns values: set train.backend.critic=true"),
        (GRPO(), {"train": ARTrainConfig(ARBackendConfig(critic=True))}, "GRPO learns no values: leave train"),
        (
            PPO(),
            {"advantage": AdvantageConfig(scale="none")},
            r"from its critic \(algorithm.gae\), so advantage has no",
        ),
        (PPO(), {"responses": DAPO}, "with a critic groups of equal rewards teach as well"),
        (
            GRPO(),
            {"responses": DAPO, "advantage": AdvantageConfig(scope="global")},
            "with advantage.scope=global groups of equal rewards teach as well",
        ),
        (
            GRPO(),
            {"responses": DAPO, "advantage": AdvantageConfig(combine="per_component")},
            "set combine=weighted_sum, or leave max_draws at 0, got 3",
        ),
        (
            GRPO(),
            {
                "responses": ResponseConfig(overlong=Overlong(buffer=4)),
                "advantage": AdvantageConfig(combine="per_component"),
            },
            "set combine=weighted_sum, or leave overlong out",
        ),
        (GRPO(), {"reward": RewardConfig({"overlong": WeightedScorer(Nines())})}, r"scorers named \['overlong'\]"),
    ],
)
def test_what_does_not_fit_the_algorithm_is_refused(
    algorithm: TokenAlgorithm, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        config(tmp_path, algorithm, **settings)


def test_a_critic_needs_no_second_sample_to_compare_with(tmp_path: Path) -> None:
    single = DataConfig(ListedPrompts(("12", "3")), prompts_per_step=2, samples_per_prompt=1)
    config(tmp_path, PPO(), data=single)
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        config(tmp_path, GRPO(), data=single)
