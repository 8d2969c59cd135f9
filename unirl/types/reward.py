"""What a reward service says of a batch."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.batch import Rows, dense, listed, mapped


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Rows):
    """Rewards of N samples.

    total:      `(N,)` float32, the weighted sum; NaN marks a sample as invalid (never 0: 0 is a score)
    components: one `(N,)` column per scorer, unweighted; NaN where that scorer failed
    causes:     per sample, why it is invalid, or ""
    """

    total: torch.Tensor = dense()
    components: dict[str, torch.Tensor] = mapped()
    causes: list[str] = listed()

    @property
    def valid(self) -> torch.Tensor:
        """`(N,)` bool."""
        return torch.isfinite(self.total)
