"""Several ranks without Ray: processes that are joined by gloo, kept for the whole session."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import join, leave


class RankPool:
    """`pool(n, function, *args)` is what `function(rank_info, *args)` returns on each of n ranks.

    function is importable by name. What a rank raises is raised here; the others fail after `timeout` seconds in a
    collective that it did not join.
    """

    def __init__(self, timeout: float = 30) -> None:
        self._timeout = timeout
        self._executor: ProcessPoolExecutor | None = None
        self._size = 0

    def __call__(self, ranks: int, function: Callable[..., Any], *args: Any, **axes: int) -> list[Any]:
        """axes: sizes of tp, sp, ...; the rest of the ranks are data parallel."""
        executor = self._started(ranks)
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"file://{Path(folder) / 'rendezvous'}"
            sizes = axes or {"dp": ranks}
            infos = [RankInfo(rank, ranks, **sizes) for rank in range(ranks)]
            calls = [executor.submit(_on_rank, info, rendezvous, self._timeout, function, args) for info in infos]
            errors = [call.exception() for call in calls]
            first = next((error for error in errors if error is not None and not _waited(error)), None)
            if first is not None:
                raise first
            return [call.result() for call in calls]

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def _started(self, ranks: int) -> ProcessPoolExecutor:
        if self._executor is None or self._size < ranks:
            self.close()
            self._executor = ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn"))
            self._size = ranks
        return self._executor


@contextmanager
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


def _on_rank(info: RankInfo, rendezvous: str, timeout: float, function: Callable[..., Any], args: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join(info, rendezvous, device_type="cpu", timeout=timeout)
    try:
        return function(info, *args)
    finally:
        leave()


def _waited(error: BaseException) -> bool:
    """Whether a rank failed only because another one did not come to a collective."""
    return type(error).__name__ in ("DistBackendError", "DistNetworkError") or "gloo" in str(error).lower()
