"""What a transport costs: bytes that one rank keeps and another fetches, beside a memcpy of the same bytes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement
from unirl.distributed.group.remote import Remote, remote
from unirl.distributed.tensor.plane import resolved
from unirl.types.media import Media
from unirl.types.sample import Part

REPEATS = 5
CALLS = 200


@dataclasses.dataclass(frozen=True)
class TransportCost:
    """Seconds, median of the repeats.

    keep:   a method that returns the rows, less one that returns nothing
    fetch:  a method of the other rank that is given them, less one that is given nothing
    driver: bringing them to the driver
    memcpy: of the same bytes in one process
    call:   a method that is given nothing and returns nothing, on both ranks
    """

    keep: float
    fetch: float
    driver: float
    memcpy: float
    call: float


class Warehouse(Remote):
    """Two ranks; rank 0 makes what rank 1 takes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.media = Media(images=torch.rand(shape))

    @remote(Dispatch.RANK_ZERO)
    def make(self, part: Part) -> Part:
        return dataclasses.replace(part, media=self.media)

    @remote(Dispatch.DP_SCATTER)
    def take(self, part: Part) -> None:
        """A scattered part is brought to the ranks that own its rows."""
        assert part.media is not None or len(part) == 1

    @remote(Dispatch.BROADCAST)
    def nothing(self) -> None:
        """An empty call."""


@contextmanager
def warehouse(mebibytes: int) -> Iterator[Handle[Warehouse]]:
    """On a slab of two ranks; rows of 1 MiB, one of them for rank 0."""
    with Placement(launcher="ray", device="cpu", devices=2).slab("bench") as slab:
        yield slab.spawn(Warehouse, (mebibytes, 1, 512, 512))


def measure_transport(mebibytes: int) -> TransportCost:
    """Bytes in one process, kept by rank 0 and fetched by rank 1."""
    source = torch.rand(mebibytes, 1, 512, 512)
    target = torch.empty_like(source)
    memcpy = _median(lambda: target.copy_(source))
    part = Part(ids=[f"r0.p{row}" for row in range(mebibytes)], metadata=[{} for _ in range(mebibytes)])
    with warehouse(mebibytes) as house:
        call = _median(house.nothing, CALLS)
        keep = _median(lambda: house.make(part)) - call
        kept = house.make(part)
        # Of two rows the second is rank 1's: of its two parts, this takes the whole batch there.
        fetch = _median(lambda: house.take(kept)) - call
        driver = _median(lambda: resolved(kept))
    return TransportCost(keep, fetch, driver, memcpy, call)


def _median(work: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
