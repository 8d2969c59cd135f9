"""The transport through Ray's object store: the shared memory of a node, between nodes Ray's own copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import ray

from unirl.distributed.tensor.buffer import Buffer
from unirl.distributed.tensor.layout import laid_out, put_together
from unirl.distributed.tensor.ray_objects import objects_of
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows


@dataclasses.dataclass(frozen=True)
class ObjectStore(Transport):
    """Rows arrive on the CPU. Ray counts the references and frees what driver and ranks have dropped.

    timeout: seconds that fetching may take
    """

    timeout: float = 300.0
    name: ClassVar[str] = "object_store"

    def put(self, rows: Rows) -> ray.ObjectRef[Any]:
        layout, tensors = laid_out(rows)
        # numpy arrays are written to shared memory as they are; a tensor would be pickled, at half the speed.
        return ray.put((layout, [Buffer.of(tensor) for tensor in tensors]))

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        found = objects_of(parcels, self.timeout)
        return [put_together(layout, [buffer.tensor() for buffer in buffers]) for layout, buffers in found]
