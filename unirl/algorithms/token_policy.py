"""What the policy-gradient algorithms of a language model share: pi_old, advantages, corrections, a reference's KL."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Literal, final

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs, beside_rollout
from unirl.algorithms.losses import bounded_ratio
from unirl.algorithms.token_base import ARContext, TokenAlgorithm, TokenAnchors, responses
from unirl.algorithms.token_losses import (
    KLEstimator,
    Level,
    importance_weights,
    kl_estimate,
    per_token,
    sequence_ratio,
    trained_only,
)
from unirl.models.ar_stage import TokenReplay
from unirl.types.sample import Part
from unirl.types.segment import TextSegment


@dataclasses.dataclass(frozen=True)
class Correction:
    """Truncated importance weights for samples of another engine, `w = pi_old / mu` (`importance_weights`).

    level: w of each token, or of the whole sequence
    cap:   the largest w; a larger one is truncated to it
    floor: with a floor, w outside `[floor, cap]` is 0 instead (IcePop, arXiv 2510.18855)
    """

    level: Level = "token"
    cap: float = 2.0
    floor: float | None = None

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"cap must be at least 1, the weight of a sample on policy, got {self.cap}")
        if self.floor is not None and not 0 < self.floor <= 1:
            raise ValueError(f"floor must be in (0, 1] or null, got {self.floor}")

    def weights(self, old_log_probs: torch.Tensor, segment: TextSegment) -> torch.Tensor:
        """`(T,)`, detached. old_log_probs: of pi_old, as the trainer computes them."""
        return importance_weights(
            old_log_probs,
            segment.log_probs,
            segment.loss_mask,
            segment.lengths,
            level=self.level,
            cap=self.cap,
            floor=self.floor,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """What a policy loss is computed from. T tokens, 0 where none is trained.

    log_probs:     `(T,)` of the policy, with a graph
    old_log_probs: `(T,)` of pi_old
    advantages:    `(T,)`
    segment:       the responses
    values:        `(T,)` of a critic, with a graph
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    segment: TextSegment
    values: torch.Tensor | None = None

    @property
    def ratio(self) -> torch.Tensor:
        """`(T,)`, r of each token."""
        return bounded_ratio(self.log_probs, self.old_log_probs)

    @property
    def sequence_ratio(self) -> torch.Tensor:
        """`(T,)`, GSPO's ratio of its response for each token."""
        segment = self.segment
        return sequence_ratio(self.log_probs, self.old_log_probs, segment.loss_mask, segment.lengths)


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyLoss:
    """losses: `(T,)`, with a graph
    held:   `(T,)` bool, tokens at which the trust region is at work (clipped, dropped, bounded)
    critic: `(T,)`, losses of a critic, with a graph, and their weight in the whole
    """

    losses: torch.Tensor
    held: torch.Tensor
    critic: torch.Tensor | None = None
    critic_weight: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(TokenAlgorithm):
    """A policy loss per token, `+ kl_coef KL(pi, pi_ref)`.

    kl_coef, kl: weight and estimator of the KL to the initial policy; 0 asks for no reference. See `kl_estimate`: as
                 a loss k1 pulls nowhere
    anchor:      pi_old as recorded in the rollout, or replayed before the first update
    correction:  of samples that another engine drew; None takes its log-probs for those of pi_old
    """

    kl_coef: float = 0.0
    kl: KLEstimator = "k3"
    anchor: Literal["rollout", "replay"] = "replay"
    correction: Correction | None = None

    def __post_init__(self) -> None:
        TokenAlgorithm.__post_init__(self)
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}")
        if self.correction is not None and self.anchor == "rollout":
            raise ValueError(
                "correction weighs the trainer's pi_old against the rollout's, and with anchor=rollout they are one: "
                "set anchor=replay, or leave correction out"
            )

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef > 0)

    @abstractmethod
    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        """What is the algorithm's own."""

    @final
    def anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        """None: the replay would be the very forward that the loss is going to do, so the loss takes its own."""
        if self.anchor == "rollout":
            segment = responses(part)
            return TokenAnchors(trained_only(segment.log_probs, segment.loss_mask))
        return None if context.unchanged else TokenAnchors(context.stage.replay(part).log_probs)

    @final
    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        reference = self._reference(context, part)
        segment, replay = responses(part), context.stage.replay(part)
        tokens = _tokens(part, replay, anchors)
        own = self.policy_loss(tokens)
        losses = own.losses
        means = {"train/clip_fraction": own.held.float(), "train/entropy": replay.entropy}
        maxima = {"train/ratio_deviation": (tokens.ratio.detach() - 1).abs()}
        if self.correction is not None:
            weights = self.correction.weights(tokens.old_log_probs, segment)
            losses = losses * weights
            means["train/correction"], maxima["train/correction_max"] = weights, weights
        if own.critic is not None:
            losses = losses + own.critic_weight * own.critic
            means["train/value_loss"] = own.critic.detach()
        if reference is not None:
            kl = kl_estimate(replay.log_probs, reference, self.kl)
            losses = losses + self.kl_coef * kl
            means["train/kl"] = kl.detach()
        return beside_rollout(AlgorithmOutput(losses, means, maxima), context, replay.log_probs, segment.log_probs)

    def _reference(self, context: ARContext, part: Part) -> torch.Tensor | None:
        if self.kl_coef == 0:
            return None
        with torch.no_grad(), context.weights.reference():
            return context.stage.replay(part).log_probs


def refuse_clip_range(low: float, high: float) -> None:
    """ValueError for a clip range of a ratio that is none."""
    if not 0 < low < 1 or not high > 0:
        raise ValueError(f"clip_low must be in (0, 1) and clip_high positive, got {low} and {high}")


def _tokens(part: Part, replay: TokenReplay, anchors: TokenAnchors | None) -> Tokens:
    """The present policy stands for pi_old where it still is pi_old."""
    segment = responses(part)
    advantages = segment.advantages
    if advantages is None:
        assert part.advantages is not None, "advantages come before training"
        advantages = per_token(part.advantages, segment.lengths, len(segment.tokens))
    old = replay.log_probs.detach() if anchors is None else anchors.log_probs
    return Tokens(replay.log_probs, old, advantages, segment, replay.values)
