"""What a transport costs: rows that one rank keeps and two fetch, half each, beside a memcpy of the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from tests.ray_cluster import start_transfer_queue
from unirl.distributed.group.device_pool import DevicePool
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.placement import Placement
from unirl.distributed.group.remote import Remote, remote
from unirl.distributed.tensor.plane import resolved
from unirl.types.media import Media
from unirl.types.sample import Part

REPEATS = 5
CALLS = 200

Name = Literal["object_store", "direct", "transfer_queue"]


@dataclasses.dataclass(frozen=True)
class TransportCost:
    """Seconds, median of the repeats.

    keep:   rank 0 returns the rows
    fetch:  both ranks are given half of them
    driver: the driver brings them all
    memcpy: of the same bytes in one process
    call:   both ranks are given nothing and return nothing
    """

    keep: float
    fetch: float
    driver: float
    memcpy: float
    call: float


class Warehouse(Remote):
    """Rows of 1 MiB each."""

    def __init__(self, rows: int) -> None:
        self.media = Media(images=torch.rand(rows, 1, 512, 512))

    @remote(Dispatch.RANK_ZERO)
    def make(self, part: Part) -> Part:
        return dataclasses.replace(part, media=self.media)

    @remote(Dispatch.DP_SCATTER)
    def take(self, part: Part) -> None:
        assert part.media is not None
        assert part.media.images is not None

    @remote(Dispatch.BROADCAST)
    def nothing(self) -> None:
        """Only called."""


def measure_transport(transport: Name, rows: int) -> TransportCost:
    """That many MiB, on a slab of two ranks."""
    source = torch.rand(rows, 1, 512, 512)
    target = torch.empty_like(source)
    memcpy = _median(lambda: target.copy_(source))
    part = Part(ids=[f"r0.p{row}" for row in range(rows)], metadata=[{} for _ in range(rows)])
    with contextlib.ExitStack() as closing:
        if transport == "transfer_queue":
            closing.enter_context(DevicePool(None, "cpu", 4))  # two for the ranks, two for its servers
            start_transfer_queue()
        placement = Placement(launcher="ray", device="cpu", devices=2, transport=transport)
        slab = closing.enter_context(placement.slab("bench"))
        house = slab.spawn(Warehouse, rows)
        call = _median(house.nothing, CALLS)
        keep = _median(lambda: house.make(part))
        kept = house.make(part)
        fetch, driver = _median(lambda: house.take(kept)), _median(lambda: resolved(kept))
        return TransportCost(keep=keep, fetch=fetch, driver=driver, memcpy=memcpy, call=call)


def _median(work: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
