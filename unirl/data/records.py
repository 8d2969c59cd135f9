"""Supervised records: pictures, or latents, with captions."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from unirl.data.lines import json_object, listing, read_lines
from unirl.data.pictures import read_picture
from unirl.data.prompts import epoch_rows
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sample_id import root_id
from unirl.types.seed import generator
from unirl.types.segment import CleanLatents


@dataclasses.dataclass(frozen=True)
class Records:
    """N records in memory, of pictures or of latents.

    images:   `(N, 3, H, W)` float32 in [0, 1]
    captions: N strings
    latents:  `(N, *latent)` float32, x_0 as the family's `encode_media` makes it
    """

    images: torch.Tensor | None
    captions: list[str]
    latents: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.images is None) == (self.latents is None):
            raise ValueError("records are either pictures or latents")
        found = [
            (name, rows) for name, rows in (("images", self.images), ("latents", self.latents)) if rows is not None
        ]
        for name, rows in found:
            if len(rows) != len(self.captions) or not self.captions:
                raise ValueError(f"{len(rows)} {name} and {len(self.captions)} captions are no data set")


class RecordSource(ABC):
    """Where records come from. A subclass is a frozen dataclass of its settings."""

    @abstractmethod
    def count(self) -> int:
        """How many records there are, told without reading the pictures. ValueError for malformed or missing data."""

    @abstractmethod
    def load(self) -> Records:
        """All records. ValueError for malformed or missing data."""


@dataclasses.dataclass(frozen=True)
class ImageFolder(RecordSource):
    """A `.jsonl` file of `{"image": path relative to it, "caption": text}`; pictures are resized to size x size."""

    path: Path
    size: int

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"there is no record file {self.path}")
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        _ = self._rows

    def count(self) -> int:
        return len(self._rows)

    def load(self) -> Records:
        pictures = []
        for path, _ in self._rows:
            try:
                pictures.append(read_picture(path, (self.size, self.size)))
            except OSError as error:
                raise ValueError(f"{self.path}: {path} cannot be read as a picture ({error})") from error
        return Records(torch.stack(pictures), [caption for _, caption in self._rows])

    @functools.cached_property
    def _rows(self) -> list[tuple[Path, str]]:
        return _captioned_files(self.path, "image")


@dataclasses.dataclass(frozen=True)
class LatentFolder(RecordSource):
    """A `.jsonl` file of `{"latents": path relative to it, "caption": text}`: latents that were computed before.

    Each path is a safetensors file of one tensor named `latents`, x_0 of one record as the family's `encode_media`
    makes it (scaled and shifted, without a batch axis); all are of the shape that `sampling` asks for.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"there is no record file {self.path}")
        _ = self._rows

    def count(self) -> int:
        return len(self._rows)

    def load(self) -> Records:
        latents = [_latents(path) for path, _ in self._rows]
        for (path, _), one in zip(self._rows, latents, strict=True):
            if one.shape != latents[0].shape:
                first, own = tuple(latents[0].shape), tuple(one.shape)
                raise ValueError(
                    f"{self.path}: all latents must be of one shape: {path} has {own}, the first one {first}"
                )
        return Records(None, [caption for _, caption in self._rows], torch.stack(latents))

    @functools.cached_property
    def _rows(self) -> list[tuple[Path, str]]:
        return _captioned_files(self.path, "latents")


@dataclasses.dataclass(frozen=True)
class RecordSampler:
    """Batches of an endless sequence of shuffled epochs; batch b is a pure function of (seed, b).

    caption_dropout: this share of captions is replaced by the empty prompt, which trains the unconditional branch
    """

    records: Records
    count: int
    seed: int
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= len(self.records.captions):
            there = len(self.records.captions)
            raise ValueError(f"batch_size={self.count} does not fit the {there} records there are: take 1 to {there}")
        if not 0 <= self.caption_dropout < 1:
            raise ValueError(f"caption_dropout must be in [0, 1), got {self.caption_dropout}")

    def draw(self, batch: int) -> Part:
        """The rows of batch `batch`: a given Part with pictures and captions."""
        rows = epoch_rows(len(self.records.captions), self.count, batch, key=(self.seed, "records"))
        dropped = torch.rand(self.count, generator=generator(self.seed, "captions", batch)) < self.caption_dropout
        captions = [
            "" if drop else self.records.captions[row] for row, drop in zip(rows, dropped.tolist(), strict=True)
        ]
        return Part(
            ids=[root_id(batch, row) for row in range(self.count)],
            metadata=[{} for _ in rows],
            media=Media(texts=captions, images=None if self.records.images is None else self.records.images[rows]),
            segment=None if self.records.latents is None else CleanLatents(latents=self.records.latents[rows]),
        )


def _captioned_files(path: Path, key: str) -> list[tuple[Path, str]]:
    """The rows `{key: file relative to path, "caption": text}` of a file, at least one; their files exist."""
    rows, problems = read_lines(path, functools.partial(_captioned_file, path.parent, key))
    if problems:
        raise ValueError(listing(problems))
    if not rows:
        raise ValueError(f"{path} is empty; give at least one record")
    return rows


def _captioned_file(folder: Path, key: str, line: str) -> tuple[Path, str]:
    row = json_object(line)
    name, caption = (row.get(field) for field in (key, "caption"))
    if not isinstance(name, str) or not isinstance(caption, str):
        raise ValueError(f"a row is an object with strings '{key}' and 'caption'")
    file = folder / name
    if not file.is_file():
        raise ValueError(f"there is no {key} {file}")
    return file, caption


def _latents(path: Path) -> torch.Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
    if set(found) != {"latents"}:
        raise ValueError(f"{path} must hold one tensor named 'latents', it holds {sorted(found)}")
    latents = found["latents"].float()
    if not latents.isfinite().all():
        raise ValueError(f"{path} holds values that are not finite")
    return latents
