"""GRPO (arXiv 2402.03300): PPO's clipped surrogate on every token, with advantages relative to the group.

Dr.GRPO is this with `advantage.scale: none` and a constant horizon, DAPO this with a wider upper clip, token-mean and
dynamic sampling: both are recipes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs
from unirl.algorithms.losses import bounded_ratio, clipped_away, clipped_surrogate
from unirl.algorithms.token_base import (
    ARContext,
    TokenAlgorithm,
    TokenAnchors,
    old_policy,
    or_itself,
    token_advantages,
)
from unirl.algorithms.token_losses import kl_estimate
from unirl.types.sample import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(TokenAlgorithm):
    """`max(-A r, -A clip(r, 1 - low, 1 + high)) + kl_coef KL(pi, pi_ref)` per token.

    clip_low, clip_high: clip range of the ratio; a higher upper one keeps rare tokens alive (DAPO, arXiv 2503.14476)
    kl_coef, kl:         weight and estimator of the KL to the initial policy; 0 asks for no reference
    anchor:              pi_old as recorded in the rollout, or replayed before the first update
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    anchor: Literal["rollout", "replay"] = "replay"

    def __post_init__(self) -> None:
        TokenAlgorithm.__post_init__(self)
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ValueError(
                f"clip_low must be in (0, 1) and clip_high positive, got {self.clip_low} and {self.clip_high}"
            )
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}")

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef > 0)

    def anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        return old_policy(context, part, self.anchor)

    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        reference = self._reference(context, part)
        replay = context.stage.replay(part)
        ratio = bounded_ratio(replay.log_probs, or_itself(anchors, replay).log_probs)
        advantages = token_advantages(part)
        losses = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        means = {
            "train/clip_fraction": clipped_away(ratio, advantages, self.clip_low, self.clip_high).float(),
            "train/entropy": replay.entropy,
        }
        if reference is not None:
            kl = kl_estimate(replay.log_probs, reference, self.kl)
            losses = losses + self.kl_coef * kl
            means["train/kl"] = kl.detach()
        return AlgorithmOutput(losses, means, maxima={"train/ratio_deviation": (ratio.detach() - 1).abs()})

    def _reference(self, context: ARContext, part: Part) -> torch.Tensor | None:
        if self.kl_coef == 0:
            return None
        with torch.no_grad(), context.weights.reference():
            return context.stage.replay(part).log_probs
