"""From rewards to advantages: tensors in, tensors out. Statistics are population statistics in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

Scale = Literal["group_std", "global_std", "none"]
_WHITE = 1e-8  # added to the variance: without differences but rounding, whitening must not make some


def group_relative(rewards: torch.Tensor, groups: Sequence[str], *, scale: Scale, eps: float = 1e-6) -> torch.Tensor:
    """`(r - mean of its group) / (std + eps)` (GRPO, arXiv 2402.03300).

    rewards: `(N,)`; non-finite ones are left out of the statistics and get advantage 0
    groups:  N group names; rows of a group need not stand together
    scale:   the std of the group, of all rewards, or no division

    A group whose finite rewards are all equal, one finite reward included, gets exactly 0.
    Returns `(N,)` float32. Example: `[1, 3, 5, 5]` in groups `a a b b` gives `[-1, 1, 0, 0]`.
    """
    if rewards.ndim != 1 or len(groups) != len(rewards):
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} do not fit {len(groups)} group names")
    values = rewards.detach().to(torch.float64)
    numbers = group_numbers(groups).to(values.device)
    finite, spread = torch.isfinite(values), spread_of(values, numbers)
    # Equality is tested on the values: a mean that is off by an ulp, divided by eps, would be an advantage of 1.
    taught = finite & spread.differ[numbers]
    advantages = values - spread.mean[numbers]
    if scale == "group_std":
        advantages = advantages / (spread.std[numbers] + eps)
    elif scale == "global_std" and finite.any():
        advantages = advantages / (values[finite].std(correction=0) + eps)
    return torch.where(taught, advantages, 0).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of the finite values in each of G groups, `(G,)`.

    count:     how many
    mean, std: in float64, the std that of the population; 0 where there is none
    differ:    whether there are two that differ
    """

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    differ: torch.Tensor


def spread_of(values: torch.Tensor, numbers: torch.Tensor) -> Spread:
    """values: `(N,)`; numbers: `(N,)`, the group of each, 0 .. G - 1. One pass, however many groups there are."""
    finite = torch.isfinite(values)
    own, kept = numbers[finite], values[finite].double()
    none = kept.new_zeros(int(numbers.max()) + 1 if len(numbers) else 0)
    count = none.index_add(0, own, torch.ones_like(kept))
    mean = none.index_add(0, own, kept) / count.clamp(min=1)
    square = none.index_add(0, own, (kept - mean[own]).square()) / count.clamp(min=1)
    low = torch.full_like(none, torch.inf).scatter_reduce(0, own, kept, "amin")
    high = torch.full_like(none, -torch.inf).scatter_reduce(0, own, kept, "amax")
    return Spread(count, mean, square.sqrt(), low < high)


def group_numbers(groups: Sequence[str]) -> torch.Tensor:
    """The groups by number, in the order in which they appear: `a a b a` gives `[0, 0, 1, 0]`."""
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(group, len(known)) for group in groups], dtype=torch.long)


def combine_rewards(components: dict[str, torch.Tensor], weights: dict[str, float]) -> torch.Tensor:
    """`sum_k w_k r_k` in float64, `(N,)`. A component of weight 0 has no influence, even where it is NaN."""
    if set(components) != set(weights):
        raise ValueError(f"weights {sorted(weights)} do not name the reward components {sorted(components)}")
    weighted = [weights[name] * components[name].to(torch.float64) for name in components if weights[name] != 0]
    if not weighted:
        raise ValueError(f"all reward weights are 0: {weights}")
    return torch.stack(weighted).sum(0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over sequences that end at their last True.

    rewards, values, mask: `(N, L)`. A False inside a sequence (a tool's token) carries credit across: it is no step.
    Returns advantages and returns `(N, L)`, 0 where the mask is False.
    """
    if rewards.shape != values.shape or rewards.shape != mask.shape or rewards.ndim != 2:
        raise ValueError(f"shapes differ: {tuple(rewards.shape)}, {tuple(values.shape)}, {tuple(mask.shape)}")
    advantages = torch.zeros_like(rewards)
    running, next_value = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        step = delta + gamma * lam * running
        running = torch.where(mask[:, t], step, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], step, 0)
    return advantages, torch.where(mask, advantages + values, 0)


def packed_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    whiten: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae` of packed sequences with one reward `(N,)` each, at the last True of its mask.

    values, mask: `(T,)`; lengths: `(N,)`, they sum to T. whiten: over the mask, in sequences with a finite reward.
    Returns advantages and returns `(T,)` float32, 0 outside of the mask and in sequences without a finite reward.
    """
    written = torch.arange(int(lengths.max()), device=mask.device) < lengths[:, None]
    trained = torch.zeros_like(written).masked_scatter(written, mask) & torch.isfinite(rewards)[:, None]
    padded = torch.zeros(written.shape, dtype=torch.float64, device=mask.device)
    padded_values = padded.masked_scatter(written, values.double())
    last = trained & (trained.flip(1).cumsum(1).flip(1) == 1)
    terminal = torch.where(last, rewards.double()[:, None], padded)
    advantages, returns = gae(terminal, padded_values, trained, gamma=gamma, lam=lam)
    if whiten and trained.any():
        kept = advantages[trained]
        advantages = torch.where(trained, (advantages - kept.mean()) / (kept.var(correction=0) + _WHITE).sqrt(), 0)
    return advantages[written].float(), returns[written].float()
