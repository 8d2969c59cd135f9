"""Row operations over dataclasses: select, split and concat keep every kind of field aligned.

A subclass of `Rows` declares for each field how it follows the rows of the batch::

    @dataclass(frozen=True, eq=False)
    class Answer(Rows):
        scores: torch.Tensor = dense()           # (N, ...)      row i belongs to sample i
        tokens: torch.Tensor = packed("lengths") # (sum L, ...)  rows of different length, end to end
        lengths: torch.Tensor = dense()          # (N,)
        sigmas: torch.Tensor = shared()          # one value for the whole batch, equal in all that are joined
        notes: list[str] = listed()              # Python objects, one a row

A nested field may be held by an `Elsewhere`: rows that another process keeps, on which the same operations work without
moving them. A field whose length does not fit the batch is an error; a field may be None for the whole batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch

_KIND = "rows"
_LENGTHS = "lengths"
_MASK = "mask"
_HEAVY = "heavy"


def dense(default: Any = dataclasses.MISSING) -> Any:
    """A tensor `(N, ...)`."""
    return dataclasses.field(default=default, metadata={_KIND: "dense"})


def padded(default: Any = dataclasses.MISSING, *, mask: str) -> Any:
    """A tensor `(N, L, ...)` whose L may differ between batches; joining pads with zeros (False) at the end.

    `mask` names the padded field that says which positions are real (of the mask itself: its own name). Where that is
    None, padding would pass for content, and batches of different L cannot be joined.
    """
    return dataclasses.field(default=default, metadata={_KIND: "padded", _MASK: mask})


def packed(lengths: str, default: Any = dataclasses.MISSING) -> Any:
    """A tensor `(sum L, ...)`, its rows end to end; `lengths` names the dense field that holds L `(N,)`."""
    return dataclasses.field(default=default, metadata={_KIND: "packed", _LENGTHS: lengths})


def listed(default: Any = dataclasses.MISSING) -> Any:
    """A list of N Python objects."""
    return dataclasses.field(default=default, metadata={_KIND: "listed"})


def nested(default: Any = dataclasses.MISSING, *, heavy: tuple[type[Rows], ...] = ()) -> Any:
    """Another `Rows` of N rows.

    heavy: the classes whose values stay in the process that made them, and are `Elsewhere` for the driver of many ranks
    """
    return dataclasses.field(default=default, metadata={_KIND: "nested", _HEAVY: heavy})


def mapped(default: Any = dataclasses.MISSING) -> Any:
    """A dict of dense tensors with the same keys in all batches that are joined."""
    return dataclasses.field(default=default, metadata={_KIND: "mapped"})


def shared(default: Any = dataclasses.MISSING) -> Any:
    """One value for all rows; joining batches whose values differ is an error."""
    return dataclasses.field(default=default, metadata={_KIND: "shared"})


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Base of every batched value. Frozen: a changed batch is a new batch (`dataclasses.replace`)."""

    def __post_init__(self) -> None:
        counts = {name: count for name, _, value in self._present() if (count := self._count(name, value)) is not None}
        if not counts:
            raise ValueError(f"{type(self).__name__} has no field that tells its number of rows")
        if len(set(counts.values())) > 1:
            raise ValueError(f"{type(self).__name__}: fields disagree on the number of rows: {counts}")

    def __len__(self) -> int:
        return next(c for name, _, value in self._present() if (c := self._count(name, value)) is not None)

    def select(self, index: Sequence[int] | torch.Tensor) -> Self:
        """The rows at `index`, in that order; rows may repeat."""
        rows = row_numbers(index, len(self))
        return self._map(lambda name, value: self._select(name, value, rows))

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which must add up to the batch."""
        if sum(sizes) != len(self):
            raise ValueError(f"sizes {list(sizes)} do not add up to the batch of {len(self)} rows")
        fields = dataclasses.fields(self)
        pieces = (self._cut(field.name, self.__dict__[field.name], sizes) for field in fields)
        return [
            type(self)(**dict(zip((field.name for field in fields), own, strict=True)))
            for own in zip(*pieces, strict=True)
        ]

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Join batches in order; `concat(x.split(sizes)) == x`."""
        if not batches:
            raise ValueError(f"cannot join zero batches of {cls.__name__}")
        if len(batches) == 1:
            return batches[0]
        return cls(**{field.name: _concat(cls, field, batches) for field in dataclasses.fields(cls)})

    def to(self, device: torch.device | str) -> Self:
        """Every tensor on `device`."""
        return self._map(lambda _, value: _to(value, torch.device(device)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: _packed(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: _unpacked(value) for name, value in state.items()})

    def _present(self) -> Iterator[tuple[str, str, Any]]:
        for field in dataclasses.fields(self):
            value = self.__dict__[field.name]
            if value is not None:
                yield field.name, field.metadata[_KIND], value

    def _map(self, change: Callable[[str, Any], Any]) -> Self:
        names = [field.name for field in dataclasses.fields(self)]
        values = ((name, self.__dict__[name]) for name in names)
        return type(self)(**{name: None if value is None else change(name, value) for name, value in values})

    def _metadata(self, name: str) -> dict[str, str]:
        return cast(dict[str, str], type(self).__dataclass_fields__[name].metadata)

    def _lengths(self, name: str) -> torch.Tensor:
        return self.__dict__[self._metadata(name)[_LENGTHS]]

    def _count(self, name: str, value: Any) -> int | None:
        kind = self._metadata(name)[_KIND]
        if kind == "shared":
            return None
        if kind == "packed":
            lengths = self._lengths(name)
            if int(lengths.sum()) != len(value):
                label, summed = f"{type(self).__name__}.{name}", int(lengths.sum())
                raise ValueError(f"{label} holds {len(value)} elements, its lengths add up to {summed}")
            return len(lengths)
        if kind == "mapped":
            sizes = {key: len(column) for key, column in value.items()}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"{type(self).__name__}.{name}: columns of different length: {sizes}")
            return next(iter(sizes.values()), None)
        return len(value)

    def _cut(self, name: str, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """`value` in each piece of a split. All at once: piece by piece, the whole of it would be read for each."""
        kind = self._metadata(name)[_KIND]
        if value is None or kind == "shared":
            return [value] * len(sizes)
        if kind == "nested":
            return value.split(sizes)
        if kind == "listed":
            return [value[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        if kind == "mapped":
            columns = zip(*(_cloned(column.split(list(sizes))) for column in value.values()), strict=True)
            return [dict(zip(value, own, strict=True)) for own in columns] if value else [{} for _ in sizes]
        if kind == "packed":
            sizes = [int(lengths.sum()) for lengths in self._lengths(name).split(list(sizes))]
        return _cloned(value.split(list(sizes)))

    def _select(self, name: str, value: Any, rows: torch.Tensor) -> Any:
        kind = self._metadata(name)[_KIND]
        if kind == "shared":
            return value
        if kind == "listed":
            return [value[row] for row in rows.tolist()]
        if kind == "nested":
            return value.select(rows)
        if kind == "mapped":
            return {key: column[rows.to(column.device)] for key, column in value.items()}
        if kind == "packed":
            pieces = value.split(self._lengths(name).tolist())
            return torch.cat([pieces[row] for row in rows.tolist()]) if rows.numel() else value[:0]
        return value[rows.to(value.device)]


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A tensor on its way to another process, as numpy's array: pickling it takes a tenth of the time."""

    array: Any


def _packed(value: Any) -> Any:
    if type(value) is dict:
        return {key: _packed(item) for key, item in value.items()}
    plain = type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad
    return _Packed(value.numpy()) if plain and value.dtype != torch.bfloat16 else value


def _unpacked(value: Any) -> Any:
    if type(value) is dict:
        return {key: _unpacked(item) for key, item in value.items()}
    if type(value) is not _Packed:
        return value
    # What a process reads from shared memory must not be written to.
    return torch.from_numpy(value.array if value.array.flags.writeable else value.array.copy())


def _cloned(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each with memory of its own: a view is pickled with all that it is a view of."""
    return [piece.clone() for piece in pieces]


def row_numbers(index: Sequence[int] | torch.Tensor, count: int) -> torch.Tensor:
    """`index` as `(n,)` int64. ValueError for what are no rows of a batch of `count`."""
    rows = torch.as_tensor(index)
    if rows.numel() and (rows.dtype == torch.bool or rows.is_floating_point()):
        raise ValueError(f"select takes row numbers, got {rows.dtype}; of a mask take `mask.nonzero().flatten()`")
    rows = rows.to(torch.long)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise ValueError(f"rows {rows.tolist()} are out of range for a batch of {count}")
    return rows


class Elsewhere(ABC):
    """Stands in a nested field for N rows that are kept in another place. Frozen, like Rows."""

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def select(self, index: Sequence[int] | torch.Tensor) -> Self:
        """The rows at `index`, in that order; rows may repeat."""

    @abstractmethod
    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive pieces of the given sizes, which add up to N."""

    @classmethod
    @abstractmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Join in order; `concat(x.split(sizes)) == x`."""


def nested_fields(rows: Rows) -> Iterator[tuple[str, tuple[type[Rows], ...], Rows | Elsewhere]]:
    """Name, heavy classes and value of each nested field that is not None."""
    for field in dataclasses.fields(rows):
        value = rows.__dict__[field.name]
        if field.metadata[_KIND] == "nested" and value is not None:
            yield field.name, field.metadata[_HEAVY], value


def _concat(owner: type, field: dataclasses.Field[Any], batches: Sequence[Rows]) -> Any:
    kind, label = field.metadata[_KIND], f"{owner.__name__}.{field.name}"
    values = [batch.__dict__[field.name] for batch in batches]
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise ValueError(f"{label} is set in some of the batches to join and missing in others")
    if kind == "shared":
        for other in values[1:]:
            if not _equal(values[0], other):
                raise ValueError(f"{label} must be the same in all batches to join: {values[0]} against {other}")
        return values[0]
    if kind == "listed":
        return [item for value in values for item in value]
    if kind == "nested":
        if len({type(value) for value in values}) > 1:
            raise ValueError(f"{label}: cannot join {sorted({type(value).__name__ for value in values})}")
        return type(values[0]).concat(values)
    if kind == "mapped":
        if len({tuple(sorted(value)) for value in values}) > 1:
            raise ValueError(f"{label}: keys differ between the batches to join: {[sorted(v) for v in values]}")
        return {key: torch.cat([value[key] for value in values]) for key in values[0]}
    if kind == "padded":
        mask = field.metadata[_MASK]
        _check_padding(label, values, mask, masked=batches[0].__dict__[mask] is not None)
        values = pad_to_longest(values)
    return torch.cat(values)


def _check_padding(label: str, tensors: Sequence[torch.Tensor], mask: str, *, masked: bool) -> None:
    lengths = sorted({tensor.shape[1] for tensor in tensors})
    if len(lengths) > 1 and not masked:
        raise ValueError(
            f"{label}: lengths {lengths} cannot be joined without {mask!r}, their padding would pass for content; "
            "encode to one length"
        )


def piece_sizes(count: int, size: int | None) -> list[int]:
    """What `split` takes: pieces of `size` rows, and a last one of what is left; None is one piece."""
    size = size or count
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])


def pad_to_longest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros (False) appended along dimension 1 until all tensors are equally long."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return [torch.cat([t, t.new_zeros(t.shape[0], longest - t.shape[1], *t.shape[2:])], dim=1) for t in tensors]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor | Rows):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value
