"""DataPlane: what a rank does with the heavy fields of the arguments and results of its methods."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from unirl.distributed.group.replace import replace_each
from unirl.distributed.tensor.field_ref import FieldRef, Span
from unirl.distributed.tensor.layout import laid_out, tensor_bytes
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Elsewhere, Rows, nested_fields
from unirl.types.sample import Sample

Value = TypeVar("Value")
Known = dict[int, tuple[Rows, FieldRef]]  # rows that came by reference, by their id, with that reference

# A parcel of this size costs little beside the copying of it, and a rank that needs one row fetches not much more.
PARCEL_BYTES = 8 * 2**20
# What the driver holds of a shard must not grow with its bytes.
MOST_PARCELS = 4


@dataclasses.dataclass(frozen=True)
class DataPlane:
    """transport: carries what results hold; parcel_bytes: rows are kept in parcels of this size, or larger ones"""

    transport: Transport
    parcel_bytes: int = PARCEL_BYTES

    def parked(self, value: Value, origin: str, known: Known) -> Value:
        """`value` with references in place of its heavy fields that hold tensors; what came by reference goes so.

        origin: who made it; known: what `fetched` returned beside the arguments
        """

        def change(name: str, field: Rows | Elsewhere) -> Rows | Elsewhere:
            if isinstance(field, Elsewhere):
                return field
            if id(field) in known:
                return known[id(field)][1]
            return self._parked(field, origin) if laid_out(field)[1] else field

        return _changed(value, change)

    def _parked(self, rows: Rows, origin: str) -> FieldRef:
        count, nbytes = len(rows), tensor_bytes(rows)
        share = max(1, self.parcel_bytes * count // max(nbytes, 1), -(-count // MOST_PARCELS))
        sizes = [min(share, count - start) for start in range(0, count, share)]
        pieces = rows.split(sizes) if len(sizes) > 1 else [rows]
        parcels = [self._parcel(piece, origin) for piece in pieces]
        return FieldRef.of(type(rows), [Span(parcel, 0, parcel.rows) for parcel in parcels])

    def _parcel(self, rows: Rows, origin: str) -> Parcel:
        ticket = self.transport.put(rows)
        return Parcel(uuid.uuid4().hex, len(rows), tensor_bytes(rows), origin, self.transport, ticket)


def resolved(value: Value, reads: tuple[str, ...] | None = None) -> Value:
    """`value` with its rows here. reads: the heavy fields that are wanted, by name; None brings all of them."""
    return fetched(value, reads)[0]


def fetched(value: Value, reads: tuple[str, ...] | None) -> tuple[Value, Known]:
    """As `resolved`; beside it what came by reference."""
    references: dict[int, FieldRef] = {}

    def note(name: str, field: Rows | Elsewhere) -> Rows | Elsewhere:
        if isinstance(field, FieldRef) and (reads is None or name in ("", *reads)):
            references[id(field)] = field
        return field

    _changed(value, note)
    if not references:
        return value, {}
    parcels = _brought(dict.fromkeys(parcel for ref in references.values() for parcel in ref.parcels))
    taken = {key: ref.taken(parcels) for key, ref in references.items()}
    here = _changed(value, lambda _, field: taken.get(id(field), field))
    return here, {id(rows): (rows, references[key]) for key, rows in taken.items()}


def _brought(parcels: Iterable[Parcel]) -> dict[Parcel, Rows]:
    by_transport: dict[Transport, list[Parcel]] = {}
    for parcel in parcels:
        by_transport.setdefault(parcel.transport, []).append(parcel)
    return {
        parcel: rows
        for transport, own in by_transport.items()
        for parcel, rows in zip(own, transport.get(own), strict=True)
    }


def _changed(value: Any, change: Callable[[str, Rows | Elsewhere], Rows | Elsewhere]) -> Any:
    """`value` with every heavy field (and what stands for one) as `change(name, field)` makes it; itself if none does.

    Looked into are Samples, Rows, and tuples, lists and dicts of them; a reference by itself has the name "".
    """

    def one(item: Elsewhere | Sample | Rows) -> Any:
        if isinstance(item, Elsewhere):
            return change("", item)
        if isinstance(item, Sample):
            parts = _changed(item.parts, change)
            return item if parts is item.parts else Sample(parts)
        fields: dict[str, Any] = {}
        for name, heavy, field in nested_fields(item):
            new = change(name, field) if isinstance(field, (Elsewhere, *heavy)) else _changed(field, change)
            if new is not field:
                fields[name] = new
        return dataclasses.replace(item, **fields) if fields else item

    return replace_each(value, (Elsewhere, Sample, Rows), one)
