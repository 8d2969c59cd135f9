"""GSPO (arXiv 2507.18071): the clipped surrogate of the ratio of whole responses, as advantages are theirs as well.

The ratio of a response is the geometric mean of those of its tokens, far closer to 1: hence the small clip range.
"""

from __future__ import annotations

import dataclasses

from unirl.algorithms.losses import clipped_away, clipped_surrogate
from unirl.algorithms.token_losses import Aggregation
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens, refuse_clip_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPO(TokenPolicy):
    """`max(-A s, -A clip(s, 1 - low, 1 + high))`, `s = exp(mean of (new - old))` over the tokens of a response.

    clip_low, clip_high: clip range of s
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        refuse_clip_range(self.clip_low, self.clip_high)

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        ratio, advantages = tokens.sequence_ratio, tokens.advantages
        return PolicyLoss(
            losses=clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high),
            held=clipped_away(ratio, advantages, self.clip_low, self.clip_high),
        )
