"""The contract of a transport, and the parcels that it carries."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from unirl.types.batch import Rows


class Transport(ABC):
    """Keeps rows in the process that made them, or near it, until nobody holds their ticket any more. Picklable.

    name:             how a recipe calls it
    counted_in_ranks: whether Ray's tensor transports count its tickets, in the ranks, whose actors must be made for it
    """

    name: ClassVar[str]
    counted_in_ranks: ClassVar[bool] = False

    @abstractmethod
    def put(self, rows: Rows) -> Any:
        """Keep `rows`, and give what stands for them anywhere. Who drops its last copy frees them."""

    @abstractmethod
    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        """The rows of each parcel, in memory that may be written to. WorkerLostError where a rank took them along."""


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Rows that a rank keeps, never cut: what moves, moves by the parcel.

    key:       its name in the run, the only thing by which parcels are compared
    rows:      how many
    nbytes:    of their tensors
    origin:    who made them, for messages
    transport: what brings them
    ticket:    what the transport gave for them
    """

    key: str
    rows: int = dataclasses.field(compare=False)
    nbytes: int = dataclasses.field(compare=False)
    origin: str = dataclasses.field(compare=False)
    transport: Transport = dataclasses.field(compare=False)
    ticket: Any = dataclasses.field(compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Nowhere(Transport):
    """For rows that nobody will ask for."""

    name: ClassVar[str] = "nowhere"

    def put(self, rows: Rows) -> None:
        """Keep nothing."""

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        raise ValueError(f"rows made {parcels[0].origin} were not kept: another rank speaks for it")
