"""What scorers that are a model share: one load, batches, a device, and a version that says which function it was."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, final

import torch

from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class Card:
    """What a person must know to read a score.

    looks_at:      image, video, audio or text, with the prompt or without
    range, unit:   of the score, in a few words; higher_is_better
    licence:       of the weights
    checkpoints:   official hub ids, first the default
    preprocessing: the variant in a word or two: it is part of the version, since it decides the score
    """

    looks_at: str
    range: str
    unit: str
    licence: str
    checkpoints: tuple[str, ...]
    preprocessing: str
    higher_is_better: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelScorer(Scorer):
    """A scorer with weights, which the first `score` loads.

    batch_size: samples in one forward
    device:     None takes CUDA where it is, else the CPU
    dtype:      of the weights
    """

    card: ClassVar[Card]

    batch_size: int = 8
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @abstractmethod
    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model with what it needs beside it, in eval mode."""

    @abstractmethod
    def modules(self, loaded: Any) -> Iterable[torch.nn.Module]:
        """The modules whose weights are the scorer's."""

    @abstractmethod
    def judge(self, loaded: Any, samples: list[ScorerInput]) -> list[float]:
        """The scores of at most `batch_size` samples, without gradient."""

    @final
    def score(self, samples: list[ScorerInput]) -> list[float]:
        loaded, scores = self._loaded, list[float]()
        with torch.no_grad():
            for start in range(0, len(samples), self.batch_size):
                scores += self.judge(loaded, samples[start : start + self.batch_size])
        return scores

    @final
    def prepare(self) -> None:
        _ = self._loaded

    @final
    def sleep(self) -> None:
        self._move("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @final
    def wake(self) -> None:
        self._move(self._place)

    @final
    def version(self) -> str:
        """Name, hash of the weights and preprocessing: equal versions are one function, up to rounding."""
        digest = hashlib.blake2b(digest_size=8)
        for module in self.modules(self._loaded):
            for name, value in sorted(module.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"{type(self).__name__}/{digest.hexdigest()}/{self.variant}"

    @property
    def variant(self) -> str:
        """The preprocessing, with the settings of it that change the score."""
        return self.card.preprocessing

    @property
    def _place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def _move(self, place: str) -> None:
        if "_loaded" in vars(self):  # what is not loaded is nowhere
            for module in self.modules(self._loaded):
                module.to(place)

    @functools.cached_property
    def _loaded(self) -> Any:
        return self.load(torch.device(self._place), getattr(torch, self.dtype))
