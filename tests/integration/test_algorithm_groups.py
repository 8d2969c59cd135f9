"""The algorithms of language models as options of a recipe's group `algorithm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unirl.algorithms.base import GAE
from unirl.algorithms.cispo import CISPO
from unirl.algorithms.dppo import DPPO
from unirl.algorithms.drpo import DRPO
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.gspo import GSPO
from unirl.algorithms.ppo import PPO
from unirl.config.error import ConfigError
from unirl.config.run import load_recipe
from unirl.trainer.ar import ARConfig
from unirl.trainer.responses import Overlong, ResponseConfig

RECIPE = """# @package _global_
defaults:
  - /base@_global_: ar
  - /rollout: trainside
  - /algorithm: {algorithm}
  - _self_
run: {{name: run, steps: 1, seed: 0}}
model: {{_target_: unirl.models.tiny_language.TinyLM}}
data:
  prompts: {{_target_: unirl.data.prompts.ListedPrompts, prompts: ["1", "2"]}}
  prompts_per_step: 2
  samples_per_prompt: 4
sampling: {{max_new_tokens: 20}}
reward: {{scorers: {{length: {{scorer: {{_target_: unirl.reward.scorers.length.Length, least: 1}}}}}}}}
train: {{backend: {{max_grad_norm: 0.5}}}}
"""

Recipe = Callable[..., ARConfig]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A run that takes an option of the group, with overrides."""

    def loaded(algorithm: str, *overrides: str) -> ARConfig:
        path = tmp_path / f"{algorithm}.yaml"
        path.write_text(RECIPE.format(algorithm=algorithm))
        config = load_recipe(str(path), list(overrides))
        assert isinstance(config, ARConfig)
        return config

    return loaded


@pytest.mark.parametrize(
    ("option", "algorithm"),
    [
        ("grpo", GRPO()),
        ("gspo", GSPO()),
        ("dppo", DPPO()),
        ("drpo", DRPO()),
        ("cispo", CISPO()),
        ("ppo", PPO()),
        ("dr_grpo", GRPO(clip_high=0.2, aggregation="seq-mean-token-sum-norm", horizon=20)),
    ],
)
def test_an_option_is_the_algorithm_with_its_settings(recipe: Recipe, option: str, algorithm: Any) -> None:
    config = recipe(option)
    assert config.algorithm == algorithm
    assert config.responses == ResponseConfig()
    assert config.advantage.scale == ("none" if option == "dr_grpo" else "group_std")
    assert config.train.backend.critic == (option == "ppo")


def test_dapo_is_grpo_with_what_is_done_to_its_responses(recipe: Recipe) -> None:
    config = recipe("dapo", "responses.overlong.buffer=4")
    assert config.algorithm == GRPO(clip_low=0.2, clip_high=0.28, aggregation="token-mean")
    assert config.responses == ResponseConfig(max_draws=10, overlong=Overlong(4, 1.0), mask_truncated=True)


def test_dapo_asks_for_the_length_of_its_buffer(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"responses.overlong.buffer: missing; give an int"):
        recipe("dapo")


def test_the_settings_of_a_critic_belong_to_ppo(recipe: Recipe) -> None:
    config = recipe("ppo", "algorithm.gae={lam: 1.0, whiten: false}")
    assert config.algorithm.needs.values == GAE(gamma=1.0, lam=1.0, whiten=False)
    with pytest.raises(ConfigError, match=r"algorithm.gae: unknown key of GRPO"):
        recipe("grpo", "algorithm.gae={lam: 1.0}")
    with pytest.raises(ConfigError, match=r"PPO learns values: set train.backend.critic=true"):
        recipe("ppo", "train.backend.critic=false")


def test_a_correction_is_a_section_of_any_of_them(recipe: Recipe) -> None:
    config = recipe("cispo", "algorithm.correction={level: sequence, cap: 3.0}")
    assert isinstance(config.algorithm, CISPO)
    assert config.algorithm.correction is not None
    assert (config.algorithm.correction.level, config.algorithm.correction.cap) == ("sequence", 3.0)
