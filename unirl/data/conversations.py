"""Conversations for supervised training: JSON lines, Parquet files and data sets of the hub."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

from unirl.data.lines import accepted, by_reason, json_object, read_lines
from unirl.data.messages import conversation_of
from unirl.data.prompts import epoch_rows
from unirl.types.conversation import Conversation
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sample_id import root_id

logger = logging.getLogger(__name__)


class ConversationSource(ABC):
    """Where conversations come from. A subclass is a frozen dataclass of its settings."""

    @abstractmethod
    def count(self) -> int | None:
        """How many there are; None where that is not known before they are loaded."""

    @abstractmethod
    def rows(self) -> tuple[Conversation, ...]:
        """All of them, in order. ValueError for malformed or missing data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredConversations(ConversationSource):
    """Rows of `prompt` and `response`, or of `messages`: a list of turns with `role` and `content` (data/messages.py).

    columns:       names in the data of these three, where they differ: `response: completion` reads `completion`, and
                   a column that is itself called `response` is then left; every row must have the columns named
    max_bad_share: malformed rows are an error by default; up to this share of them is skipped, and logged by reason
    """

    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    max_bad_share: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - {"messages", "prompt", "response"})
        if unknown:
            raise ValueError(f"columns names messages, prompt and response, not {unknown}")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(f"columns takes one column for two things: {self.columns}")
        if not 0 <= self.max_bad_share < 1:
            raise ValueError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")

    @property
    @abstractmethod
    def location(self) -> Path:
        """For messages; pictures are relative to the folder of a file."""

    @abstractmethod
    def read(self) -> tuple[list[Conversation], list[str]]:
        """The good rows, and `location:number: reason` for each other one."""

    @final
    def rows(self) -> tuple[Conversation, ...]:
        rows, problems = self._read
        return accepted(self.location, rows, problems, self.max_bad_share, "conversation")

    @final
    def skipped(self) -> dict[str, int]:
        """Malformed rows by reason."""
        return by_reason(self._read[1])

    @final
    def conversation(self, record: dict[str, Any]) -> Conversation:
        """One row."""
        for name, column in self.columns.items():
            if column not in record:
                raise ValueError(f"the row has no column {column!r}, which is to be its {name} (columns: {[*record]})")
        others = {key: value for key, value in record.items() if key not in {*self.columns, *self.columns.values()}}
        own = {name: record[column] for name, column in self.columns.items()}
        return conversation_of({**others, **own}, self.location.parent)

    @final
    def numbered(self, records: Iterable[dict[str, Any]]) -> tuple[list[Conversation], list[str]]:
        """`read` of rows that are no lines, counted from 1."""
        rows: list[Conversation] = []
        problems: list[str] = []
        for number, record in enumerate(records, start=1):
            try:
                rows.append(self.conversation(record))
            except ValueError as error:
                problems.append(f"{self.location}:{number}: {error}")
        return rows, problems

    @functools.cached_property
    def _read(self) -> tuple[list[Conversation], list[str]]:
        rows, problems = self.read()
        if rows and problems:
            logger.warning("%s: malformed rows: %s", self.location, by_reason(problems))
        return rows, problems


@dataclasses.dataclass(frozen=True)
class JsonConversations(StoredConversations):
    """A `.jsonl` file with a row a line."""

    path: Path

    def __post_init__(self) -> None:
        StoredConversations.__post_init__(self)
        _refuse_missing(self.path)
        self.rows()

    @property
    def location(self) -> Path:
        return self.path

    def count(self) -> int:
        return len(self.rows())

    def read(self) -> tuple[list[Conversation], list[str]]:
        return read_lines(self.path, lambda line: self.conversation(json_object(line)))


@dataclasses.dataclass(frozen=True)
class ParquetConversations(StoredConversations):
    """A `.parquet` file (extra `unirl[parquet]`); it is read when the run starts."""

    path: Path

    def __post_init__(self) -> None:
        StoredConversations.__post_init__(self)
        _refuse_missing(self.path)
        _refuse_without("pyarrow", "parquet")

    @property
    def location(self) -> Path:
        return self.path

    def count(self) -> None:
        return None

    def read(self) -> tuple[list[Conversation], list[str]]:
        return self.numbered(self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{self.path} cannot be read as Parquet ({error})") from error


@dataclasses.dataclass(frozen=True)
class HubConversations(StoredConversations):
    """A data set that `datasets.load_dataset` loads (extra `unirl[datasets]`); it is read when the run starts.

    dataset:  a hub id or a folder
    subset:   its configuration, where it has several
    split:    which rows: `train`, or a slice such as `train[:1000]`
    revision: a commit, tag or branch
    """

    dataset: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def __post_init__(self) -> None:
        StoredConversations.__post_init__(self)
        _refuse_without("datasets", "datasets")

    @property
    def location(self) -> Path:
        return Path(self.dataset) / self.split

    def count(self) -> None:
        return None

    def read(self) -> tuple[list[Conversation], list[str]]:
        from datasets import load_dataset

        try:
            found: Any = load_dataset(self.dataset, self.subset, split=self.split, revision=self.revision)
        except (OSError, ValueError) as error:
            raise ValueError(f"data set {self.dataset}, split {self.split}: {error}") from error
        return self.numbered(found)


@dataclasses.dataclass(frozen=True)
class ConversationSampler:
    """Batches of an endless sequence of shuffled epochs; batch b is a pure function of (seed, b)."""

    conversations: tuple[Conversation, ...]
    count: int
    seed: int

    def __post_init__(self) -> None:
        there = len(self.conversations)
        if not 1 <= self.count <= there:
            raise ValueError(f"batch_size={self.count} does not fit the {there} conversations: take 1 to {there}")

    def draw(self, batch: int) -> Part:
        """The rows of batch `batch`: a given Part with conversations."""
        rows = epoch_rows(len(self.conversations), self.count, batch, key=(self.seed, "records"))
        return as_conversations([self.conversations[row] for row in rows], batch)


def as_conversations(conversations: Iterable[Conversation], batch: int) -> Part:
    """Conversations as a given Part."""
    rows = list(conversations)
    return Part(
        ids=[root_id(batch, row) for row in range(len(rows))],
        metadata=[{} for _ in rows],
        media=Media(conversations=rows),
    )


def _refuse_missing(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file of conversations {path}")


def _refuse_without(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"this source needs {package}: pip install 'unirl[{extra}]'")
