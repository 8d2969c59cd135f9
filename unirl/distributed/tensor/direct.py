"""The transport from process to process: Ray's direct tensor transport, over NIXL (RDMA, NVLink, shared memory, TCP).

Rows stay in the memory of the GPU or CPU where they were made, uncopied, and a rank that needs them reads them there.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import ray
import torch

from unirl.distributed.tensor.buffer import Buffer
from unirl.distributed.tensor.layout import laid_out, put_together
from unirl.distributed.tensor.ray_objects import objects_of
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows

# One-sided: nobody has to send. Ray's transports with two sides (gloo, NCCL) need the driver for every transfer, cannot
# leave the one group an actor may be in, and kill both actors where a transfer fails.
_BACKEND = "nixl"
# Two threads in NIXL at once crash it. And where a process has freed something, it meets that process anew and drops
# transfers under way: one parcel after another.
_ONE_AT_A_TIME = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Direct(Transport):
    """Rows arrive on the kind of device that they are kept on. Ray counts the references, as it does for its store.

    timeout: seconds that fetching may take
    """

    timeout: float = 300.0
    name: ClassVar[str] = "direct"
    counted_in_ranks: ClassVar[bool] = True

    def put(self, rows: Rows) -> ray.ObjectRef[Any]:
        layout, tensors = laid_out(rows)
        # What is sent together must be on one kind of device, and not empty: the rest goes through the object store.
        kind = "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
        sent = [
            tensor.detach().contiguous() if tensor.device.type == kind and tensor.numel() else Buffer.of(tensor)
            for tensor in tensors
        ]
        with _ONE_AT_A_TIME:
            return ray.put((layout, sent), _tensor_transport=_BACKEND)

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        rows: list[Rows] = []
        for parcel in parcels:
            with _ONE_AT_A_TIME:
                ((layout, sent),) = objects_of([parcel], self.timeout)
            rows.append(put_together(layout, list(map(_own, sent))))
        return rows


def _own(sent: torch.Tensor | Buffer) -> torch.Tensor:
    """A copy, since a rank that fetches what it keeps itself is given the very tensor that is kept."""
    return sent.tensor() if isinstance(sent, Buffer) else sent.clone()
