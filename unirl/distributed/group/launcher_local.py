"""The launcher of one rank in this process: no actors, no copies, and a debugger stops where it should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, RankHost
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote


class LocalLauncher(Launcher):
    """Rank 0 of 1."""

    def __init__(self, slab: str) -> None:
        self.slab = slab
        self.ranks = (RankInfo(rank=0, world_size=1),)
        self._host = RankHost(slab, self.ranks[0])

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        self._host.build(key, remote, call)

    def call(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        return {rank: self._host.call(key, method, call) for rank, call in calls.items()}

    def close(self) -> None:
        self._host.close()
