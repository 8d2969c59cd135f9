"""What the transports of Ray share: tensors as bytes, and errors that name who made what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch

from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.tensor.transport import Parcel


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor as bytes `(n,)` uint8, which numpy has for every dtype, bfloat16 included."""

    data: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        flat = tensor.detach().cpu().reshape(-1)
        # A view of one element may have any stride and still count as contiguous.
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """A copy: what Ray gives is the store's own memory, which all readers share, so torch must never write there."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), self.data)
        return tensor


def objects_of(parcels: Sequence[Parcel], timeout: float) -> list[Any]:
    """What was put for each parcel. WorkerLostError where a process has ended, TimeoutError after `timeout` seconds."""
    origins = ", ".join(sorted({parcel.origin for parcel in parcels}))
    try:
        return ray.get([parcel.ticket for parcel in parcels], timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        size = sum(parcel.nbytes for parcel in parcels) / 2**20
        raise TimeoutError(f"{size:.0f} MiB made {origins} did not arrive within {timeout:g} s") from error
    except ray.exceptions.RayDirectTransportError as error:
        raise WorkerLostError(f"rows made {origins} are lost: its process does not answer") from error
    except ray.exceptions.ObjectLostError as error:
        lost = next(parcel for parcel in parcels if parcel.ticket.hex() == error.object_ref_hex)
        raise WorkerLostError(f"rows made {lost.origin} are lost: its process has ended") from error
