"""CISPO (MiniMax-M1, arXiv 2506.13585): the weight of a token is bounded, its gradient is never taken away."""

from __future__ import annotations

import dataclasses

from unirl.algorithms.token_losses import cispo
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPO(TokenPolicy):
    """`-sg(clip(r, floor, cap)) A log pi`.

    cap, floor: bounds of r itself, not of its distance from 1: the paper's `1 + eps_high` is cap = 1 + eps_high, and a
                floor of 0 is none
    """

    cap: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        if self.cap < 1 or not 0 <= self.floor <= 1:
            raise ValueError(
                "cap and floor are bounds of the ratio itself: cap must be at least 1 and floor in [0, 1], got "
                f"{self.cap} and {self.floor}"
            )

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        ratio = tokens.ratio.detach()
        losses = cispo(tokens.log_probs, ratio, tokens.advantages, cap=self.cap, floor=self.floor)
        return PolicyLoss(losses, held=(ratio > self.cap) | (ratio < self.floor))
