"""Supervised records: pictures with captions."""

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


@dataclasses.dataclass(frozen=True)
class Records:
    """N pictures in memory. images: `(N, 3, H, W)` float32 in [0, 1]; captions: N strings."""

    images: torch.Tensor
    captions: list[str]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.captions) or not self.captions:
            raise ValueError(f"{len(self.images)} images and {len(self.captions)} captions are no data set")


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
        rows, problems = read_lines(self.path, self._row)
        if problems:
            raise ValueError(listing(problems))
        if not rows:
            raise ValueError(f"{self.path} is empty; give at least one record")
        return rows

    def _row(self, line: str) -> tuple[Path, str]:
        match json_object(line):
            case {"image": str(image), "caption": str(caption)}:
                picture = self.path.parent / image
                if not picture.is_file():
                    raise ValueError(f"there is no image {picture}")
                return picture, caption
            case _:
                raise ValueError("a row is an object with strings 'image' and 'caption'")


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
            media=Media(texts=captions, images=self.records.images[rows]),
        )
