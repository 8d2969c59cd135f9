"""GRPO (arXiv 2402.03300): PPO's clipped surrogate on every token, with advantages relative to the group.

Upper clip and token mean are DAPO's; the paper has `clip_high: 0.2` and `aggregation: seq-mean-token-mean`. Dr.GRPO is
this with `advantage.scale: none` and a constant horizon, DAPO with dynamic sampling: both are recipes.
"""

from __future__ import annotations

import dataclasses

from unirl.algorithms.losses import clipped_away, clipped_surrogate
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens, refuse_clip_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(TokenPolicy):
    """`max(-A r, -A clip(r, 1 - low, 1 + high))` per token.

    clip_low, clip_high: clip range of the ratio; a higher upper one keeps rare tokens alive (DAPO, arXiv 2503.14476)
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        refuse_clip_range(self.clip_low, self.clip_high)

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        ratio, advantages = tokens.ratio, tokens.advantages
        return PolicyLoss(
            losses=clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high),
            held=clipped_away(ratio, advantages, self.clip_low, self.clip_high),
        )
