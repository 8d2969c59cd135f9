"""The transport through Ray's object store: the shared memory of a node, between nodes Ray's own copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import ray
import ray.exceptions
import torch

from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.tensor.layout import laid_out, put_together
from unirl.distributed.tensor.transport import Parcel, Transport
from unirl.types.batch import Rows


@dataclasses.dataclass(frozen=True)
class ObjectStore(Transport):
    """Ray counts the references: an object is freed when driver and ranks have dropped theirs.

    timeout: seconds that fetching may take
    """

    timeout: float = 300.0
    name: ClassVar[str] = "object_store"

    def put(self, rows: Rows) -> ray.ObjectRef[Any]:
        layout, tensors = laid_out(rows)
        # numpy arrays are written to shared memory as they are; a tensor would be pickled, at half the speed.
        return ray.put((layout, [_Buffer.of(tensor) for tensor in tensors]))

    def get(self, parcels: Sequence[Parcel]) -> list[Rows]:
        return [put_together(layout, [buffer.tensor() for buffer in buffers]) for layout, buffers in self._get(parcels)]

    def _get(self, parcels: Sequence[Parcel]) -> list[Any]:
        try:
            return ray.get([parcel.ticket for parcel in parcels], timeout=self.timeout)
        except ray.exceptions.GetTimeoutError as error:
            size = sum(parcel.nbytes for parcel in parcels) / 2**20
            origins = ", ".join(sorted({parcel.origin for parcel in parcels}))
            raise TimeoutError(f"{size:.0f} MiB made {origins} did not arrive within {self.timeout:g} s") from error
        except ray.exceptions.ObjectLostError as error:
            lost = next(parcel for parcel in parcels if parcel.ticket.hex() == error.object_ref_hex)
            raise WorkerLostError(f"rows made {lost.origin} are lost: its process has ended") from error


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """A tensor as bytes `(n,)` uint8, which numpy has for every dtype, bfloat16 included."""

    data: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Buffer:
        flat = tensor.detach().cpu().reshape(-1)
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        # What Ray gives is the store's own memory, which all readers share: torch must never write there.
        return torch.from_numpy(self.data.copy()).view(self.dtype).reshape(self.shape)
