"""Prompt sources. What a rollout gets is a pure function of (seed, rollout number): a resume needs no cursor."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from unirl.data.lines import accepted, by_reason, json_object, read_lines
from unirl.data.pictures import Picture, PictureFile
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sample_id import root_id
from unirl.types.seed import generator

logger = logging.getLogger(__name__)
_JSON_LINES, _TEXT = ".jsonl", (".txt", "")


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One prompt and what travels with it (answers, routing).

    pictures: that it comes with (editing, image-to-video)
    """

    prompt: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @property
    def key(self) -> str:
        """Equal for rows that ask the same of a model, whatever travels with them."""
        return repr((self.prompt, self.pictures))


class PromptSource(ABC):
    """Where prompts come from. A subclass is a frozen dataclass of its settings."""

    @abstractmethod
    def rows(self) -> tuple[PromptRow, ...]:
        """All rows, in file order. ValueError for malformed or missing data."""

    @property
    def origin(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def digest(self) -> str:
        """SHA-256 of all prompts with their metadata, in order; pictures are not read."""
        rows = [[row.prompt, row.metadata] for row in self.rows()]
        text = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__qualname__)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class ListedPrompts(PromptSource):
    """Prompts written in the recipe."""

    prompts: tuple[str, ...]

    def __post_init__(self) -> None:
        _refuse_empty([PromptRow(prompt) for prompt in self.prompts], "prompts")

    def rows(self) -> tuple[PromptRow, ...]:
        return tuple(PromptRow(prompt) for prompt in self.prompts)


@dataclasses.dataclass(frozen=True)
class FilePrompts(PromptSource):
    """A text file (`.txt`, or a name without suffix) with a prompt a line, or a `.jsonl` file with an object a line.

    An object has a "prompt" and any other fields (metadata).
    "pictures" is the list of a prompt's source pictures, as paths relative to the file.
    max_bad_share: malformed rows are an error by default; up to this share of them is skipped, and logged by reason
    """

    path: Path
    max_bad_share: float = 0.0

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"there is no prompt file {self.path}")
        if self.path.suffix not in (_JSON_LINES, *_TEXT):
            raise ValueError(
                f'prompts are read from a {_JSON_LINES} file, an object such as {{"prompt": "a cat"}} a line, or '
                f"from a {_TEXT[0]} file, a prompt a line: {self.path} is neither; write it as one of them"
            )
        if not 0 <= self.max_bad_share < 1:
            raise ValueError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")
        self.rows()
        if self.skipped():
            logger.warning("%s: rows skipped: %s", self.path, self.skipped())

    @property
    def origin(self) -> str:
        return str(self.path)

    def rows(self) -> tuple[PromptRow, ...]:
        rows, problems = self._parsed
        return accepted(self.path, rows, problems, self.max_bad_share, "prompt")

    def skipped(self) -> dict[str, int]:
        """Malformed rows by reason."""
        return by_reason(self._parsed[1])

    @functools.cached_property
    def _parsed(self) -> tuple[list[PromptRow], list[str]]:
        read = functools.partial(json_row, self.path.parent)
        return read_lines(self.path, read if self.path.suffix == _JSON_LINES else _text_row)


@dataclasses.dataclass(frozen=True)
class PromptSampler:
    """Draws `count` rows a rollout from an endless sequence of shuffled epochs, without repeats inside an epoch.

    Ten rows, two a rollout: rollouts 0-4 are a permutation of all rows, 5-9 another one. Rows left over at the end of
    an epoch open the next batch, so none is lost.
    """

    source: tuple[PromptRow, ...]
    count: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= len(self.source):
            raise ValueError(
                f"prompts_per_step={self.count} does not fit the {len(self.source)} prompts there are: take 1 to "
                f"{len(self.source)}"
            )

    def draw(self, rollout: int, extra: int = 0, *, count: int | None = None) -> Part:
        """The roots of rollout `rollout`, with their ids.

        extra: 1, 2, ... are further draws for the same rollout, each from a sequence of epochs of its own
        count: take only the first so many of the rows
        """
        key = (self.seed, "prompts", "extra", extra) if extra else (self.seed, "prompts")
        rows = epoch_rows(len(self.source), self.count, rollout, key=key)[:count]
        return as_roots([self.source[row] for row in rows], rollout, first=extra * self.count)


def epoch_rows(size: int, count: int, batch: int, *, key: tuple[int | str, ...]) -> list[int]:
    """Row numbers of batch `batch` in the endless sequence of shuffled epochs of `size` rows that `key` names."""
    first = batch * count
    wanted = [divmod(position, size) for position in range(first, first + count)]
    epochs = range(first // size, (first + count - 1) // size + 1)
    orders = {epoch: torch.randperm(size, generator=generator(*key, epoch)).tolist() for epoch in epochs}
    return [orders[epoch][offset] for epoch, offset in wanted]


def plain_texts(rows: Iterable[PromptRow]) -> list[str]:
    """The distinct texts of the prompts that come without pictures, which can be judged before any of these is read."""
    return list(dict.fromkeys(row.prompt for row in rows if not row.pictures))


def as_roots(rows: list[PromptRow], rollout: int, *, first: int = 0) -> Part:
    """Prompt rows as the first Part of a Sample, numbered from `first`; its pictures are read now."""
    sources = [[picture.pixels() for picture in row.pictures] for row in rows]
    return Part(
        ids=[root_id(rollout, first + row) for row in range(len(rows))],
        metadata=[dict(row.metadata) for row in rows],
        media=Media(texts=[row.prompt for row in rows], sources=sources if any(sources) else None),
    )


def _text_row(line: str) -> PromptRow:
    if not line.strip():
        raise ValueError("the prompt is empty")
    return PromptRow(line.strip())


def json_row(folder: Path, line: str) -> PromptRow:
    """A line of a `.jsonl` file of prompts that lies in `folder`."""
    record = json_object(line)
    if "prompt" not in record:
        raise ValueError(f"the row has no 'prompt' (keys: {sorted(record)})")
    prompt = record.pop("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt must be a string (got {type(prompt).__name__})")
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    names = record.pop("pictures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the pictures must be a list of file names (got {names!r})")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"there is no such picture ({missing} in {folder})")
    return PromptRow(prompt, record, tuple(PictureFile(folder / name) for name in names))


def _refuse_empty(rows: list[PromptRow], name: str) -> None:
    if not rows:
        raise ValueError(f"{name} is empty; give at least one")
    for number, row in enumerate(rows):
        if not row.prompt.strip():
            raise ValueError(f"{name}[{number}] is an empty prompt ({row.prompt!r}); fill it in or take it out")
