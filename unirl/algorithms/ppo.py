"""PPO (arXiv 1707.06347) on tokens: the clipped surrogate with advantages of a critic, which is trained beside it."""

from __future__ import annotations

import dataclasses

from unirl.algorithms.base import GAE, Needs
from unirl.algorithms.losses import clipped_away, clipped_surrogate
from unirl.algorithms.token_losses import value_loss
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens, refuse_clip_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO(TokenPolicy):
    """`max(-A r, -A clip(r, 1 - low, 1 + high)) + value_coef max((v - R)^2, (v_clip - R)^2) / 2` per token.

    clip_low, clip_high:    clip range of the ratio
    gae:                    how rewards and values become advantages
    value_coef, value_clip: weight of the critic's loss, and how far a value may move from that of the rollout
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    gae: GAE = dataclasses.field(default_factory=GAE)
    value_coef: float = 0.1
    value_clip: float = 0.5

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        refuse_clip_range(self.clip_low, self.clip_high)
        if not self.value_coef > 0 or not self.value_clip > 0:
            raise ValueError(
                f"value_coef and value_clip must be positive, got {self.value_coef} and {self.value_clip}; without a "
                "critic it is GRPO"
            )

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef > 0, values=self.gae)

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        ratio, advantages, segment = tokens.ratio, tokens.advantages, tokens.segment
        assert tokens.values is not None, "PPO's stage has a value head"
        assert segment.values is not None, "values come before training"
        assert segment.returns is not None, "returns come before training"
        critic = value_loss(tokens.values, segment.values, segment.returns, self.value_clip)
        return PolicyLoss(
            losses=clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high),
            held=clipped_away(ratio, advantages, self.clip_low, self.clip_high),
            critic=critic,
            critic_weight=self.value_coef,
        )
