"""What every trainer that learns from rewards shares: which prompts, how advantages, what is said of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.data.prompts import PromptSource
from unirl.reward.service import RewardConfig
from unirl.types.advantages import Scale, group_numbers, spread_of
from unirl.types.metric import Metrics, maximum, mean, minimum, total
from unirl.types.sample import Part

# What `reward_metrics` says of the total under `reward/`, where each scorer has a figure of its name as well.
REWARD_FIGURES = ("mean", "std", "group_std", "max", "min", "invalid")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """prompts; prompts_per_step: P prompts a rollout; samples_per_prompt: G samples of each (the group)."""

    prompts: PromptSource
    prompts_per_step: int
    samples_per_prompt: int

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages: see `Part.compute_advantages`."""

    scope: Literal["group", "prompt", "global"] = "group"
    scale: Scale = "group_std"
    combine: Literal["weighted_sum", "per_component"] = "weighted_sum"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, got {self.eps}")

    def of(self, part: Part, reward: RewardConfig) -> Part:
        """`part` with its advantages."""
        weights = reward.weights if self.combine == "per_component" else None
        return part.compute_advantages(self.scope, self.scale, combine=self.combine, weights=weights, eps=self.eps)


def check_groups(data: DataConfig, advantage: AdvantageConfig) -> None:
    """ValueError where no sample has another one to be compared with."""
    prompts, group = data.prompts_per_step, data.samples_per_prompt
    if (prompts * group if advantage.scope == "global" else group) < 2:
        raise ValueError(
            f"data.samples_per_prompt={group}: a group of one has no baseline, so every advantage is 0; "
            "use at least 2, or advantage.scope=global with several prompts"
        )


def reward_metrics(part: Part) -> Metrics:
    """Figures of a scored part; of its advantages where they are relative to the group."""
    assert part.rewards is not None
    assert part.reward_components is not None
    finite = part.rewards[part.valid].double()
    numbers = group_numbers(part.groups("group"))
    spread = spread_of(part.rewards, numbers)
    metrics: Metrics = {"reward/invalid": total(float(len(part) - len(finite)))}
    if part.advantages is not None:
        trained = torch.zeros_like(spread.count).index_add(0, numbers, (part.advantages != 0).double())
        metrics["advantage/constant_groups"] = mean(float((trained == 0).double().mean()), float(len(trained)))
    if len(finite):
        weight = float(len(finite))
        metrics["reward/mean"] = mean(float(finite.mean()), weight)
        metrics["reward/std"] = mean(float(finite.std(correction=0)), weight)
        spreads = spread.std[spread.count > 0]
        metrics["reward/group_std"] = mean(float(spreads.mean()), float(len(spreads)))
        metrics["reward/max"], metrics["reward/min"] = maximum(float(finite.max())), minimum(float(finite.min()))
    for name, column in part.reward_components.items():
        known = column[torch.isfinite(column)].double()
        metrics[f"reward/{name}"] = mean(float(known.mean()) if len(known) else float("nan"), float(len(known)))
    return metrics
