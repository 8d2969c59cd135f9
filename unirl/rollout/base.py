"""The engine contract: a request Sample in, the Sample filled out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from unirl.types.sample import Sample


class RolloutEngine(ABC):
    """Fills the unfilled frontier of a Sample."""

    @abstractmethod
    def generate(self, sample: Sample | None) -> Sample | None:
        """The same Sample with its frontier filled, stamped with the version of the weights; None on a rank of none."""
