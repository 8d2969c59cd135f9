"""Rows that ranks keep, and launchers of several ranks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending, RankHost
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.distributed.tensor.in_process import InProcess
from unirl.distributed.tensor.plane import DataPlane, resolved
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows, nested


@dataclasses.dataclass(frozen=True, eq=False)
class Holder(Rows):
    """A batch with one heavy field."""

    content: Rows = nested(heavy=(Rows,))


@dataclasses.dataclass(frozen=True)
class Counting(Transport):
    """As in the process, and writes down which parcels were asked for."""

    asked: list[Parcel] = dataclasses.field(default_factory=list, hash=False)
    name = "counting"

    def put(self, rows: Rows) -> Rows:
        return rows

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        self.asked.extend(parcels)
        return [parcel.ticket for parcel in parcels]


def kept(shards: Sequence[Rows], parcel_bytes: int = 2**20, transport: Transport | None = None) -> FieldRef:
    """The reference to shards that ranks keep, each in parcels of its own, end to end."""
    plane = DataPlane(transport or InProcess(), parcel_bytes)
    refs = [plane.parked(Holder(shard), f"by rank {rank}", {}).content for rank, shard in enumerate(shards)]
    assert all(isinstance(ref, FieldRef) for ref in refs)
    return FieldRef.concat(refs)  # type: ignore[arg-type]


def brought(ref: FieldRef) -> Any:
    """The rows of a reference."""
    return resolved(ref)
