"""DRPO (arXiv 2606.09821): DPPO's trust region as a smooth pull back instead of a mask."""

from __future__ import annotations

import dataclasses

from unirl.algorithms.token_losses import drpo
from unirl.algorithms.token_policy import PolicyLoss, TokenPolicy, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DRPO(TokenPolicy):
    """`-A r + |A| pi_old (r - 1)^2 / (2 epsilon)`.

    epsilon: the push of a token is 0 where its probability has moved with A by epsilon, and turns back beyond
    """

    epsilon: float = 0.2

    def __post_init__(self) -> None:
        TokenPolicy.__post_init__(self)
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")

    def policy_loss(self, tokens: Tokens) -> PolicyLoss:
        losses = drpo(tokens.log_probs, tokens.old_log_probs, tokens.advantages, self.epsilon)
        shift = (tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()) * tokens.advantages.sign()
        return PolicyLoss(losses, held=shift > self.epsilon)
