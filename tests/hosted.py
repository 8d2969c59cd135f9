"""A launcher of many ranks without processes, for what does not depend on where ranks run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending, RankHost
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.plane import DataPlane


@dataclasses.dataclass(frozen=True)
class Done(Pending[dict[int, Any]]):
    """A call that has ended."""

    results: dict[int, Any]

    def result(self) -> dict[int, Any]:
        return self.results

    def done(self) -> bool:
        return True


class HostedLauncher(Launcher):
    """Several ranks one after another in this process, each with instances of its own.

    plane: with which they keep what their methods return; None: results go to the driver as they are
    """

    def __init__(self, slab: str, world_size: int, *, plane: DataPlane | None = None, **axes: int) -> None:
        self.slab = slab
        self.ranks = tuple(RankInfo(rank, world_size, **axes) for rank in range(world_size))
        self.hosts = [RankHost(slab, info, plane) for info in self.ranks]

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        for host in self.hosts:
            host.build(key, remote, call)

    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        return Done({rank: self.hosts[rank].call(key, method, call) for rank, call in calls.items()})

    def close(self, *, at_once: bool = False) -> None:
        for host in self.hosts:
            host.close()
