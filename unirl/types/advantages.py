"""From rewards to advantages: tensors in, tensors out. Statistics are population statistics in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Scale = Literal["group_std", "global_std", "none"]
_WHITE = 1e-8  # added to the standard deviation


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
    finite = torch.isfinite(values)
    advantages = torch.zeros_like(values)
    global_std = values[finite].std(correction=0) if finite.any() else values.new_tensor(0.0)
    for rows in _rows_of_groups(groups):
        rows = rows.to(values.device)
        kept = rows[finite[rows]]
        group = values[kept]
        # Equality is tested on the values: a mean that is off by an ulp, divided by eps, would be an advantage of 1.
        if len(group) == 0 or bool((group == group[0]).all()):
            continue
        centred = group - group.mean()
        if scale == "group_std":
            centred = centred / (group.std(correction=0) + eps)
        elif scale == "global_std":
            centred = centred / (global_std + eps)
        advantages[kept] = centred
    return advantages.to(torch.float32)


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
        advantages = torch.where(trained, (advantages - kept.mean()) / (kept.std(correction=0) + _WHITE), 0)
    return advantages[written].float(), returns[written].float()


def _rows_of_groups(groups: Sequence[str]) -> list[torch.Tensor]:
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return [torch.tensor(members, dtype=torch.long) for members in rows.values()]
