"""What the transports of Ray share: errors that name who made what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions

from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.tensor.transport import Parcel


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
