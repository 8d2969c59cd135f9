"""How well a picture compresses: rewards without a model (DDPO, arXiv 2305.13301)."""

from __future__ import annotations

import dataclasses
import io
import statistics

import numpy as np

from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class JpegIncompressibility(Scorer):
    """Size of the JPEG file in kB (1 kB = 1000 bytes); above 0, higher is richer in detail; grows with the picture.

    A video has the mean size of its frames.
    Encoder: Pillow (MIT-CMU) with its libjpeg-turbo, default chroma subsampling; builds differ by less than 1 %.
    """

    reads = frozenset({"frames"})

    quality: int = 95

    def __post_init__(self) -> None:
        _check_quality(self.quality)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [_mean_kilobytes(sample, self.quality) for sample in samples]


@dataclasses.dataclass(frozen=True)
class JpegCompressibility(Scorer):
    """`-kB / 500`, Flow-GRPO's scale (DDPO: -kB); below 0, higher is smoother. Encoder: see JpegIncompressibility."""

    reads = frozenset({"frames"})

    quality: int = 95

    def __post_init__(self) -> None:
        _check_quality(self.quality)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [-_mean_kilobytes(sample, self.quality) / 500 for sample in samples]


def _check_quality(quality: int) -> None:
    if not 1 <= quality <= 100:
        raise ValueError(f"JPEG quality is in 1..100, got {quality}")


def _mean_kilobytes(sample: ScorerInput, quality: int) -> float:
    return statistics.fmean(_kilobytes(frame, quality) for frame in sample.frames)


def _kilobytes(picture: np.ndarray, quality: int) -> float:
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(picture).save(encoded, format="JPEG", quality=quality)
    return encoded.tell() / 1000
