"""The engine contract: a request Sample in, the Sample filled out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from unirl.algorithms.base import Weights
from unirl.models.diffusion_stage import DiffusionStage
from unirl.types.sample import Sample


class Policy(Weights, Protocol):
    """What an engine that samples with the training module sees of it."""

    stage: DiffusionStage
    version: int


class RolloutEngine(ABC):
    """Fills the unfilled frontier of a Sample."""

    @abstractmethod
    def generate(self, sample: Sample) -> Sample:
        """The same Sample with its frontier filled, stamped with the version of the weights."""
