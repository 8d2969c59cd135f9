"""How the rooms above see the policy that a backend owns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from unirl.models.base import Bundle, Family

Stage = TypeVar("Stage", covariant=True)


class Trainable(Protocol):
    """What every stage has: a family and the model that it loaded."""

    @property
    def family(self) -> Family: ...

    @property
    def bundle(self) -> Bundle: ...


class Weights(Protocol):
    """Other weights of the policy, put in place for the duration of a `with` block."""

    def reference(self) -> AbstractContextManager[None]:
        """The frozen initial weights: LoRA off, or a copy."""
        ...

    def ema(self) -> AbstractContextManager[None]:
        """The EMA shadow."""
        ...


class Policy(Weights, Protocol[Stage]):
    """What an engine that samples with the training module sees of it. version: of the live weights."""

    @property
    def stage(self) -> Stage: ...

    def gathered(self) -> AbstractContextManager[None]:
        """Whole weights on this rank for the duration of a `with` block, which every rank enters."""
        ...

    @property
    def version(self) -> int: ...
