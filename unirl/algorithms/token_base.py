"""What the algorithms of a language model share: the terms of a loss are tokens, weighted by the aggregation."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import final

import torch

from unirl.algorithms import token_losses
from unirl.algorithms.base import Algorithm, AlgorithmOutput, Context, reduced
from unirl.algorithms.token_losses import Aggregation, token_weights, weighted_sum
from unirl.models.ar_stage import ARStage
from unirl.types.metric import Metrics
from unirl.types.sample import Part
from unirl.types.segment import TextSegment

ARContext = Context[ARStage]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAnchors:
    """pi_old of a micro-batch of T tokens, frozen before the first update on a rollout. log_probs: `(T,)`"""

    log_probs: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenAlgorithm(Algorithm[ARStage]):
    """An estimator whose losses are `(T,)`: one for each token of the packed responses.

    aggregation: how the losses of tokens become one number (arXiv 2503.20783, 2503.14476): the mean over all tokens of
                 the optimizer step, the mean over responses of their token mean, or that of their token sum / horizon
    horizon:     divisor of "seq-mean-token-sum-norm", and of no other
    """

    aggregation: Aggregation = "token-mean"
    horizon: int | None = None

    def __post_init__(self) -> None:
        if (self.horizon is not None) != (self.aggregation == "seq-mean-token-sum-norm"):
            raise ValueError(
                "horizon goes with aggregation=seq-mean-token-sum-norm and with no other, got "
                f"horizon={self.horizon} and aggregation={self.aggregation}"
            )
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {self.horizon}")

    @abstractmethod
    def anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        """pi_old, asked for without gradient before the first update; None where the loss takes the policy itself."""

    @abstractmethod
    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        """The loss `(T,)` of each token; what stands at tokens outside of the loss mask does not matter."""

    @final
    def terms(self, part: Part) -> float:
        segment = responses(part)
        return token_losses.terms(segment.loss_mask, segment.lengths, self.aggregation)

    @final
    def idle(self, part: Part) -> Part:
        row = super().idle(part)
        segment = responses(row)
        return dataclasses.replace(row, segment=dataclasses.replace(segment, loss_mask=segment.loss_mask | True))

    @final
    def frozen_anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        with torch.no_grad():
            return self.anchors(context, part)

    @final
    def backward(self, context: ARContext, part: Part, anchors: TokenAnchors | None, *, terms: float) -> Metrics:
        segment, own = responses(part), self.terms(part)
        output = self.loss(context, part, anchors)
        mask = segment.loss_mask
        weights = token_weights(mask, segment.lengths, self.aggregation, self.horizon)
        total = weighted_sum(output.losses, weights)
        if total.requires_grad:
            (total / terms).backward()
        trained = AlgorithmOutput(
            losses=output.losses.detach()[mask],
            means={name: column[mask] for name, column in output.means.items()},
            maxima={name: column[mask] for name, column in output.maxima.items()},
        )
        return reduced([trained], total.detach() / own, own)


def responses(part: Part) -> TextSegment:
    """The packed responses of a filled part."""
    assert isinstance(part.segment, TextSegment), "a language model is trained on responses"
    return part.segment
