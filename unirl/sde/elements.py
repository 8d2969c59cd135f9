"""Which elements of a latent count, and which are given."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Elements:
    """weights: `(*latent)`, how much each element counts in log-probs, KL and losses; None counts all alike
    given:   `(N, *latent)`, values of the elements of weight 0, which the walk does not touch (the first frame of
             image-to-video); None where nothing is given
    """

    weights: torch.Tensor | None = None
    given: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.given is not None and (self.weights is None or not bool((self.weights == 0).any())):
            raise ValueError("given elements have weight 0, but no element has")

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `(N, *latent)` with the given elements in place."""
        if self.given is None or self.weights is None:
            return x
        return torch.where(self.weights == 0, self.given.to(x.dtype), x)
