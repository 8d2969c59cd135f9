"""A policy loss on plain numbers: no model, log-probs in float64, gradients with respect to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from tests.unit.algorithms.packed import f64
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens
from unirl.types.segment import TextSegment


@dataclasses.dataclass(frozen=True)
class Outcome:
    """losses, their gradient by the log-prob of each token (alone), and where the trust region is at work."""

    losses: list[float]
    gradient: list[float]
    held: list[bool]
    given: PolicyLoss


def outcome(
    algorithm: TokenPolicy,
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    **segment: torch.Tensor,
) -> Outcome:
    """The loss of tokens whose r is `ratios`. old: probabilities under pi_old; lengths: all tokens are one response."""
    old_log_probs = f64(*(math.log(p) for p in old or [0.1] * len(ratios)))
    log_probs = (old_log_probs + f64(*ratios).log()).requires_grad_()
    packed = responses_of(lengths or [len(ratios)], **segment)
    given = algorithm.policy_loss(Tokens(log_probs, old_log_probs, f64(*advantages), packed))
    gradient = torch.autograd.grad(given.losses.sum(), log_probs)[0]
    return Outcome(given.losses.tolist(), gradient.tolist(), given.held.tolist(), given)


def responses_of(lengths: Sequence[int], **fields: torch.Tensor) -> TextSegment:
    """Responses of these lengths, all trained and none cut off, unless `fields` say otherwise."""
    count = sum(lengths)
    plain = {
        "tokens": torch.zeros(count, dtype=torch.long),
        "log_probs": torch.zeros(count),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "lengths": torch.tensor(list(lengths)),
        "truncated": torch.zeros(len(lengths), dtype=torch.bool),
    }
    return TextSegment(**{**plain, **fields})
