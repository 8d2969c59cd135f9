"""The scorer contract: samples in, one number a sample out."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from unirl.types.kinds import Read


@dataclasses.dataclass(frozen=True, eq=False)
class ScorerInput:
    """What a scorer sees of one sample.

    id:       lineage id; error messages name it
    prompt:   what the user asked for: the text of the root, also where a model rewrote it
    image:    `(H, W, 3)` uint8, read-only, or None where there is no picture
    video:    `(F, H, W, 3)` uint8, read-only, at `fps` frames a second, or None
    audio:    `(channels, samples)` float32 in [-1, 1], at `audio_rate` samples a second, or None
    text:     what a language model wrote, or None
    source:   the picture that the prompt comes with (editing, image-to-video), `(H, W, 3)` uint8, read-only; None where
              there is none, or several
    metadata: the dict of the prompt row (answers, targets); a scorer gets one of its own
    """

    id: str
    prompt: str
    image: np.ndarray | None = None
    video: np.ndarray | None = None
    fps: float | None = None
    audio: np.ndarray | None = None
    audio_rate: int | None = None
    text: str | None = None
    source: np.ndarray | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def picture(self) -> np.ndarray:
        """The image `(H, W, 3)` of a scorer that needs one; ValueError without."""
        if self.image is None:
            raise ValueError(f"{self.id} holds no picture, and this scorer scores pictures")
        return self.image

    @property
    def frames(self) -> np.ndarray:
        """What a scorer of pictures looks at, `(F, H, W, 3)`: the video's frames, or the image as the only one."""
        return self.picture[None] if self.video is None else self.video

    @property
    def clip(self) -> tuple[np.ndarray, float]:
        """The video `(F, H, W, 3)` of a scorer that needs one, and its frames a second; ValueError without."""
        if self.video is None or self.fps is None:
            raise ValueError(f"{self.id} holds no video, and this scorer scores videos")
        return self.video, self.fps

    @property
    def sound(self) -> tuple[np.ndarray, int]:
        """The audio `(channels, samples)` of a scorer that needs it, and its rate; ValueError without."""
        if self.audio is None or self.audio_rate is None or not self.audio.size:
            raise ValueError(f"{self.id} holds no sound, and this scorer scores sounds")
        return self.audio, self.audio_rate

    @property
    def original(self) -> np.ndarray:
        """The source picture `(H, W, 3)` of a scorer that needs one; ValueError without."""
        if self.source is None:
            raise ValueError(f"the prompt of {self.id} comes without one source picture, and this scorer scores edits")
        return self.source

    @property
    def written(self) -> str:
        """The text of a scorer that needs one; ValueError without."""
        if self.text is None:
            raise ValueError(f"{self.id} holds no text, and this scorer scores texts")
        return self.text

    def given(self, key: str) -> Any:
        """`metadata[key]`; ValueError where the row has none."""
        if key not in self.metadata:
            raise ValueError(f"{self.id}: metadata has no {key!r}, only {sorted(self.metadata)}: name the right key")
        return self.metadata[key]

    def own(self) -> Self:
        """This sample with metadata of its own, nested lists and dicts too: what is written there, no other sees."""
        return dataclasses.replace(self, metadata=copy.deepcopy(self.metadata))


class Unscored(float):
    """NaN with its cause: returned in place of a score, it spares the other samples of the batch a second call."""

    def __new__(cls, cause: str) -> Self:
        self = super().__new__(cls, "nan")
        self.cause = cause
        return self

    cause: str


class Scorer(ABC):
    """Judges samples one by one. A subclass is a frozen dataclass of settings; the first `score` loads its model.

    reads:      what a sample must hold beside its prompt, as far as that is known: a run whose samples lack it is
                refused before it starts
    time_limit: seconds that a sample may take where the recipe does not say; None is no limit
    """

    reads: ClassVar[frozenset[Read]] = frozenset()
    time_limit: ClassVar[float | None] = None

    @abstractmethod
    def score(self, samples: list[ScorerInput]) -> list[float]:
        """One number per sample, in order, independent of the other samples; NaN for a sample that cannot be scored.

        May raise: the service then finds the samples that are to blame.
        """

    @property
    def needs(self) -> frozenset[Read]:
        """`reads`, where it does not depend on the settings."""
        return self.reads

    def check_row(self, row: ScorerInput) -> None:  # noqa: B027 - most scorers take any prompt
        """ValueError for a prompt of which no sample could be scored. row: prompt, metadata and an empty text.

        Called for every prompt when a recipe is checked: it must be quick, and load nothing.
        """

    def connect(self) -> None:  # noqa: B027 - most scorers need nobody else
        """Called when a run starts: ValueError where a server that it needs is not there or serves something else."""

    def prepare(self) -> None:  # noqa: B027 - most scorers have nothing to load
        """Load now what the first `score` would load: under a time limit, that is no sample's time."""

    def sleep(self) -> None:  # noqa: B027 - most scorers hold no device
        """Leave the device to others; nothing is asked before `wake`."""

    def wake(self) -> None:  # noqa: B027 - most scorers hold no device
        """Take the device again: scores are those of before `sleep`."""

    def close(self) -> None:  # noqa: B027 - most scorers hold nothing open
        """Called when a run ends: close what is held open."""


class SetMeasure(ABC):
    """A figure of a whole set of samples (diversity, realism), for evaluation; never a reward."""

    @abstractmethod
    def measure(self, samples: list[ScorerInput]) -> dict[str, float]:
        """Named figures; NaN where the set is too small to have one."""
