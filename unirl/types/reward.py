"""What a reward service says of a batch."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any, Self

import torch

from unirl.types.batch import Rows, dense, listed, mapped


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a sample has no reward.

    culprit: the scorer, or "picture" where what was generated cannot be shown to any
    cause:   says whose and why, for people
    error:   what was raised, if anything was
    """

    culprit: str
    cause: str
    error: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process the error goes as its text: not every exception can be pickled, and no traceback."""
        error = self.error
        told = None if error is None else RuntimeError("".join(traceback.format_exception(error)))
        return Failure, (self.culprit, self.cause, told)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores(Rows):
    """Rewards of N samples.

    total:      `(N,)` float32, the weighted sum of the scorers that apply to a sample; NaN marks one as invalid (never
                0: 0 is a score)
    components: one `(N,)` column per scorer, unweighted; NaN where that scorer failed or does not apply
    failures:   per sample, of what counts in the reward; none for a valid one
    """

    total: torch.Tensor = dense()
    components: dict[str, torch.Tensor] = mapped()
    failures: list[tuple[Failure, ...]] = listed()

    @property
    def valid(self) -> torch.Tensor:
        """`(N,)` bool."""
        return torch.isfinite(self.total)

    @property
    def causes(self) -> list[str]:
        """Per sample, why it is invalid, or ""."""
        return ["; ".join(failure.cause for failure in row) for row in self.failures]

    def accepted(self, max_invalid: float, *, of: int | None = None) -> Self:
        """These scores; RuntimeError where more than this share of the samples failed.

        of: the samples of the whole batch, where these are only its first ones
        """
        failed, count = [row for row in self.failures if row], len(self) if of is None else of
        if len(failed) <= max_invalid * count:
            return self
        counts = {name: sum(any(f.culprit == name for f in row) for row in failed) for name in self._culprits()}
        told = ", ".join(f"{name} on {number}" for name, number in counts.items())
        first = next(failure for row in failed for failure in row if failure.culprit == next(iter(counts)))
        raise RuntimeError(
            f"{len(failed)} of {count} samples have no reward, more than max_invalid={max_invalid:g} allows. "
            f"Failed: {told}. First cause: {first.cause}"
        ) from first.error

    def _culprits(self) -> list[str]:
        """Names in the order of the components, what is no component before them."""
        seen = dict.fromkeys(failure.culprit for row in self.failures for failure in row)
        return sorted(seen, key=lambda name: list(self.components).index(name) if name in self.components else -1)
