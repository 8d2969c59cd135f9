"""The launcher of one rank in this process: no actors, no copies, and a debugger stops where it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending, RankHost, closed
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote


class LocalLauncher(Launcher):
    """Rank 0 of 1. A call that is waited for runs in the caller's thread, one that is started in that of its lane."""

    def __init__(self, slab: str) -> None:
        self.slab = slab
        self.ranks = (RankInfo(rank=0, world_size=1),)
        self._host = RankHost(slab, self.ranks[0])
        self._lanes = {beside: _Lane(slab) for beside in (False, True)}
        self._lane_of: dict[int, _Lane] = {}

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        self._host.build(key, remote, call)
        self._lane_of[key] = self._lanes[remote.beside]

    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        return self._lane(key, method).start(lambda: self._run(key, method, calls))

    def call(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        self._lane(key, method).finish()  # in order: what was started before runs before
        return self._run(key, method, calls)

    def close(self, *, at_once: bool = False) -> None:
        self._lane_of.clear()
        for lane in self._lanes.values():
            lane.thread.shutdown(wait=True, cancel_futures=True)
        self._host.close()

    def _lane(self, key: int, method: str) -> _Lane:
        if key not in self._lane_of:
            raise closed(self.slab, method)
        return self._lane_of[key]

    def _run(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        return {rank: self._host.call(key, method, call) for rank, call in calls.items()}


class _Lane:
    """Calls that run one after another in a thread of their own, which starts with the first of them."""

    def __init__(self, slab: str) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"unirl-{slab}")
        self._latest: Future[dict[int, Any]] | None = None

    def start(self, run: Callable[[], dict[int, Any]]) -> Pending[dict[int, Any]]:
        self._latest = self.thread.submit(run)
        return _InThread(self._latest)

    def finish(self) -> None:
        """Wait for what was started; how it ends is for others."""
        if self._latest is not None:
            self._latest.exception()


@dataclasses.dataclass(frozen=True)
class _InThread(Pending[dict[int, Any]]):
    future: Future[dict[int, Any]]

    def result(self) -> dict[int, Any]:
        return self.future.result()

    def done(self) -> bool:
        return self.future.done()
