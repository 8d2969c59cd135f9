"""The launcher of one rank in this process: no actors, no copies, and a debugger stops where it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending, RankHost
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote


class LocalLauncher(Launcher):
    """Rank 0 of 1. A call that is waited for runs in the caller's thread, one that is started in its worker's own."""

    def __init__(self, slab: str) -> None:
        self.slab = slab
        self.ranks = (RankInfo(rank=0, world_size=1),)
        self._host = RankHost(slab, self.ranks[0])
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._latest: dict[int, Future[dict[int, Any]]] = {}

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        self._host.build(key, remote, call)

    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        if key not in self._threads:
            self._threads[key] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"unirl-{self.slab}-{key}")
        self._latest[key] = self._threads[key].submit(self._run, key, method, calls)
        return _InThread(self._latest[key])

    def call(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        if key in self._latest:
            self._latest[key].exception()  # in order: what was started before runs before
        return self._run(key, method, calls)

    def close(self, *, at_once: bool = False) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._host.close()

    def _run(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        return {rank: self._host.call(key, method, call) for rank, call in calls.items()}


@dataclasses.dataclass(frozen=True)
class _InThread(Pending[dict[int, Any]]):
    future: Future[dict[int, Any]]

    def result(self) -> dict[int, Any]:
        return self.future.result()

    def done(self) -> bool:
        return self.future.done()
