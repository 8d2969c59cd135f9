"""DPPO (arXiv 2602.04879): a trust region of probabilities. A ratio that is large on a rare token moves little mass."""

from __future__ import annotations

import dataclasses

from unirl.algorithms.token_losses import dppo
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPPO(TokenPolicy):
    """`-A r`, dropped where r has moved with A and `|pi - pi_old| > delta`."""

    delta: float = 0.2

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is a difference of probabilities in (0, 1), got {self.delta}")

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        losses, dropped = dppo(tokens.log_probs, tokens.old_log_probs, tokens.advantages, self.delta)
        return PolicyLoss(losses, held=dropped)
