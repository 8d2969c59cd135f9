"""Several ranks without Ray: processes that are joined by gloo, kept for the whole session."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import join, leave

# What torch caches of a world outlives it now and then, with threads that spin on its closed connections.
_CALLS_OF_A_PROCESS = 20


class RankPool:
    """`pool(n, function, *args)` is what `function(rank_info, *args)` returns on each of n ranks.

    function is importable by name. What a rank raises is raised here; the others fail after `timeout` seconds in a
    collective that it did not join.
    """

    def __init__(self, timeout: float = 30) -> None:
        self._timeout = timeout
        # One process is one rank for ever: torch caches what it knows of meshes, and the place of a rank in them.
        self._executors: list[ProcessPoolExecutor] = []
        self._calls = 0

    def __call__(self, ranks: int, function: Callable[..., Any], *args: Any, **axes: int) -> list[Any]:
        """axes: sizes of tp, sp, ...; the rest of the ranks are data parallel."""
        self._start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"file://{Path(folder) / 'rendezvous'}"
            sizes = axes or {"dp": ranks}
            infos = [RankInfo(rank, ranks, **sizes) for rank in range(ranks)]
            self._join(function, infos, rendezvous)
            members = self._executors[:ranks]
            calls = [member.submit(_on_rank, info, function, args) for member, info in zip(members, infos, strict=True)]
            errors = [call.exception() for call in calls]
            # Nobody leaves before all have ended: the last one may still be making connections to the others.
            still_in = [member for member, error in zip(members, errors, strict=True) if error is None]
            for leaving in [member.submit(_leave) for member in still_in]:
                leaving.result()
            first = next((error for error in errors if error is not None and not _waited(error)), None)
            if first is not None:
                raise first
            return [call.result() for call in calls]

    def _join(self, function: Callable[..., Any], infos: list[RankInfo], rendezvous: str) -> None:
        members = self._executors[: len(infos)]
        # A new process takes its time to import what the function needs, which is none of the time to join.
        for there in [member.submit(_imported, function) for member in members]:
            there.result()
        joining = [
            member.submit(join, info, rendezvous, device_type="cpu", timeout=self._timeout)
            for member, info in zip(members, infos, strict=True)
        ]
        try:
            for one in joining:
                one.result()
        except BaseException:
            self.close()  # torch counts the groups of a process: after a join that failed ranks count differently
            raise

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown()
        self._executors.clear()

    def _start(self, ranks: int) -> None:
        if self._calls % _CALLS_OF_A_PROCESS == 0:
            self.close()
        self._calls += 1
        context = multiprocessing.get_context("spawn")
        while len(self._executors) < ranks:
            self._executors.append(
                ProcessPoolExecutor(1, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))
            )


@contextmanager
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


def _end_with(parent: int) -> None:
    """Of a session that is killed, no process goes on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _imported(function: Callable[..., Any]) -> None:
    """To be given it by name is to import its module."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _on_rank(info: RankInfo, function: Callable[..., Any], args: Any) -> Any:
    try:
        return function(info, *args)
    except BaseException:
        _leave()  # at once, for the others to notice
        raise


def _leave() -> None:
    leave()
    gc.collect()  # a group that a cycle holds has threads, which spin on its closed connections


def _waited(error: BaseException) -> bool:
    """Whether a rank failed only because another one did not come to a collective."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError") or "gloo" in str(error).lower()
