"""FieldRef: rows that other ranks keep, as the driver holds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from unirl.distributed.tensor.transport import Parcel
from unirl.types.batch import Elsewhere, Rows, row_numbers


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows start .. stop - 1 of a parcel."""

    parcel: Parcel
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class FieldRef(Elsewhere):
    """The rows of its spans, end to end. Row operations move nothing.

    Rank 0 made 3 rows (parcel a) and rank 1 made 2 (parcel b)::

        joined                   a[0:3] b[0:2]
        joined.select([4, 0, 1]) b[1:2] a[0:2]

    kind:  the class that the rows have where they are
    spans: adjacent ones are one; without rows there is one empty span, so that an empty batch can be brought as well
    """

    kind: type[Rows]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, kind: type[Rows], spans: Sequence[Span]) -> FieldRef:
        """Spans in any form: empty ones are left out, adjacent ones joined."""
        kept: list[Span] = []
        for span in spans:
            if kept and kept[-1].parcel == span.parcel and kept[-1].stop == span.start:
                kept[-1] = Span(span.parcel, kept[-1].start, span.stop)
            elif len(span):
                kept.append(span)
        return cls(kind, tuple(kept) or (Span(spans[0].parcel, 0, 0),))

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)

    def select(self, index: Sequence[int] | torch.Tensor) -> FieldRef:
        rows = row_numbers(index, len(self))
        stops = torch.tensor([span.stop for span in self.spans])
        ends = torch.tensor([len(span) for span in self.spans]).cumsum(0)
        numbers = torch.searchsorted(ends, rows, right=True)
        at = rows - ends[numbers] + stops[numbers]
        first = torch.ones(len(rows), dtype=torch.bool)  # of a run of rows that lie next to each other in one span
        first[1:] = (numbers[1:] != numbers[:-1]) | (at[1:] != at[:-1] + 1)
        runs = first.nonzero().flatten()
        lengths = torch.diff(runs, append=torch.tensor([len(rows)]))
        starts = zip(numbers[runs].tolist(), at[runs].tolist(), lengths.tolist(), strict=True)
        chosen = [Span(self.spans[number].parcel, start, start + length) for number, start, length in starts]
        return FieldRef.of(self.kind, chosen or [Span(self.spans[0].parcel, 0, 0)])

    def split(self, sizes: Sequence[int]) -> list[FieldRef]:
        left, pieces = list(reversed(self.spans)), []
        for size in sizes:
            own = [Span(left[-1].parcel, left[-1].start, left[-1].start)]
            while size:
                span = left.pop()
                end = min(span.stop, span.start + size)
                own.append(Span(span.parcel, span.start, end))
                size -= end - span.start
                if end < span.stop or not left:
                    left.append(Span(span.parcel, end, span.stop))
            pieces.append(FieldRef.of(self.kind, own))
        return pieces

    @classmethod
    def concat(cls, batches: Sequence[FieldRef]) -> FieldRef:
        kinds = {batch.kind for batch in batches}
        if len(kinds) > 1:
            raise ValueError(f"cannot join {sorted(kind.__name__ for kind in kinds)}")
        return cls.of(batches[0].kind, [span for batch in batches for span in batch.spans])

    @property
    def parcels(self) -> tuple[Parcel, ...]:
        """Those that hold its rows, each once, in the order of their first row."""
        return tuple(dict.fromkeys(span.parcel for span in self.spans))

    def taken(self, fetched: dict[Parcel, Rows]) -> Rows:
        """Its rows from those of its parcels. Of each parcel only what is needed is copied."""
        wanted: dict[Parcel, list[int]] = {parcel: [] for parcel in self.parcels}
        for span in self.spans:
            wanted[span.parcel] += range(span.start, span.stop)
        needed = {parcel: sorted(set(rows)) for parcel, rows in wanted.items()}
        pieces = [_part_of(fetched[parcel], rows) for parcel, rows in needed.items()]
        joined = self.kind.concat(pieces)
        starts = dict(zip(needed, itertools.accumulate(map(len, needed.values()), initial=0), strict=False))
        place = {
            (parcel, row): starts[parcel] + offset for parcel, rows in needed.items() for offset, row in enumerate(rows)
        }
        order = [place[span.parcel, row] for span in self.spans for row in range(span.start, span.stop)]
        return _part_of(joined, order)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for dunder names before there are fields.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r} of {len(self)} rows that are kept elsewhere: bring them with `resolved(value)`",
            name=name,
            obj=self,
        )


def _part_of(rows: Rows, index: list[int]) -> Rows:
    return rows if index == list(range(len(rows))) else rows.select(index)
