"""Turns our advantages into what codes with other conventions compute, and builds Parts from plain rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.golden.golden import Case
from unirl.types.advantages import Scale, combine_rewards, group_relative
from unirl.types.reward import Scores
from unirl.types.sample import Part

# Our result is float32, computed in float64.
FLOAT32: dict[str, Any] = {"rtol": 2e-7, "atol": 1e-7}


def blocks(count: int, size: int) -> list[str]:
    """Group names of contiguous groups of `size`."""
    return [str(row // size) for row in range(count)]


def names_of(groups: Sequence[int]) -> list[str]:
    return [str(group) for group in groups]


def with_unbiased_std(rewards: torch.Tensor, groups: Sequence[str], scale: Scale, eps: float) -> torch.Tensor:
    """Ours, turned into what a code with the unbiased std computes.

    `c / (u + eps)` with `u = p sqrt(n / (n - 1))` is `c / (p + eps q) q`, `q = sqrt((n - 1) / n)`; n counts the finite
    rewards of the group, or of all groups where the std is global.
    """
    factors = torch.zeros(len(rewards), dtype=torch.float64)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for group in set(groups):
        members = torch.tensor([name == group for name in groups])
        counted = members if scale == "group_std" else torch.ones_like(members)
        n = int(torch.isfinite(rewards[counted]).sum())
        factor = math.sqrt((n - 1) / n) if n else 0.0
        factors[members] = factor
        advantages[members] = group_relative(rewards, groups, scale=scale, eps=eps * factor).double()[members]
    return advantages * factors


def assert_equal_rewards_give_zero(case: Case, groups: list[str], eps: float) -> None:
    for dtype in (torch.float32, torch.float64):
        for scale in ("group_std", "global_std", "none"):
            ours = group_relative(case.input("rewards", dtype), groups, scale=scale, eps=eps)
            assert ours.tolist() == case.outputs["advantages_right"]


def per_component(columns: dict[str, torch.Tensor], weights: dict[str, float], size: int, eps: float) -> torch.Tensor:
    """`combine="per_component"` of a Part whose groups are contiguous, in float64."""
    count = len(next(iter(columns.values())))
    part = part_of([f"r0.p{row // size}/{row % size}" for row in range(count)])
    scores = Scores(combine_rewards(columns, weights).float(), columns, [()] * count)
    part = part.with_rewards(scores).compute_advantages(combine="per_component", weights=weights, eps=eps)
    assert part.advantages is not None
    return part.advantages.double()


def part_of(ids: list[str]) -> Part:
    return Part(ids=ids, metadata=[{} for _ in ids])
