"""The padded batch of the language files as our packed tokens, and the reduction that a test compares."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.golden.golden import Case, tensor
from unirl.algorithms.losses import bounded_ratio
from unirl.algorithms.token_losses import Aggregation, per_token, sequence_ratio, terms, token_weights, weighted_sum

# Both sides compute in float64.
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """13 tokens of 4 sequences. new, old, reference, rollout: log-probs `(T,)`, new a leaf; advantages: `(T,)`."""

    new: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Tokens:
        lengths = case.input("lengths", torch.int64)
        valid = torch.arange(6) < lengths[:, None]
        mask = case.inputs.get("mask", "mask")
        mask = tensor(case.shared[mask] if isinstance(mask, str) else mask)
        new, old, reference, rollout = (case.input(f"{name}_logp")[valid] for name in ("new", "old", "ref", "rollout"))
        return cls(
            new=new.requires_grad_(),
            old=old,
            reference=reference,
            rollout=rollout,
            advantages=per_token(case.input("advantages"), lengths, int(valid.sum())),
            mask=mask[valid].bool(),
            lengths=lengths,
            valid=valid,
        )

    @property
    def ratio(self) -> torch.Tensor:
        return bounded_ratio(self.new, self.old)

    @property
    def sequence_ratio(self) -> torch.Tensor:
        return sequence_ratio(self.new, self.old, self.mask, self.lengths)

    def mean(self, losses: torch.Tensor, aggregation: Aggregation, horizon: int | None = None) -> torch.Tensor:
        """Our loss of the whole batch."""
        weights = token_weights(self.mask, self.lengths, aggregation, horizon)
        return weighted_sum(losses, weights) / terms(self.mask, self.lengths, aggregation)

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        return padded[self.valid]

    def trained(self, values: torch.Tensor) -> torch.Tensor:
        """What a file calls masked: 0 where nothing is trained."""
        return torch.where(self.mask, values, 0)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]
