"""The transport within one process: what is kept is the value itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows


@dataclasses.dataclass(frozen=True)
class InProcess(Transport):
    """For ranks that are threads of the driver, as in tests: nothing is copied."""

    name: ClassVar[str] = "in_process"

    def put(self, rows: Rows) -> Rows:
        return rows

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        return [parcel.ticket for parcel in parcels]
