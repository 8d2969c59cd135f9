"""How the rooms above see the policy that a backend owns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from unirl.models.diffusion_stage import DiffusionStage


class Weights(Protocol):
    """Other weights of the policy, put in place for the duration of a `with` block."""

    def reference(self) -> AbstractContextManager[None]:
        """The frozen initial weights: LoRA off, or a copy."""
        ...

    def ema(self) -> AbstractContextManager[None]:
        """The EMA shadow."""
        ...


class Policy(Weights, Protocol):
    """What an engine that samples with the training module sees of it. version: of the live weights."""

    stage: DiffusionStage
    version: int
