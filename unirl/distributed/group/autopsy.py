"""Why a rank does not answer: what its process left behind, and where it hangs. Asked on the rank's own node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from unirl.distributed.group.rank_actor import Process, oom_kills

_PATIENCE = 30.0  # seconds for another node to answer
_DUMP = 1.0  # seconds in which a process writes where its threads are
_TAIL = 4000  # characters of a standard error that are worth showing


def cause_of_death(process: Process | None, error: RayError) -> str:
    """Why the process of a rank is gone, in a few words; process None: it never told where it runs."""
    if isinstance(error, OutOfMemoryError):
        return "out of memory: Ray killed it before the node ran dry"
    if process is None:
        return f"it did not start ({_last_line(error)})"
    try:
        left, kills = _on_node(process, _left_behind)
    except RayError:  # Ray may not have heard yet that it went
        return "its node is gone, or does not answer"
    fatal = [line for line in left.splitlines() if line.startswith("Fatal Python error")]
    if fatal:
        return f"it crashed ({fatal[-1].removeprefix('Fatal Python error: ')})"
    if kills > process.oom_kills:
        return (
            "killed by SIGKILL, most likely since memory ran out: the kernel of its node has killed a process for that"
        )
    return "its process ended without a word, as by SIGKILL"


def stacks(process: Process) -> str:
    """Where the threads of a process are just now; empty where it does not say."""
    return _on_node(process, _dumped)


def is_gone(process: Process) -> bool:
    """Whether a process of this node has ended. Another node's counts as gone: it is Ray's to end."""
    if process.node != ray.get_runtime_context().get_node_id():
        return True
    status = Path(f"/proc/{process.pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _on_node(process: Process, ask: Callable[[Process], Any]) -> Any:
    if process.node == ray.get_runtime_context().get_node_id():
        return ask(process)
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    task = ray.remote(ask).options(num_cpus=0, scheduling_strategy=there)
    return ray.get(task.remote(process), timeout=_PATIENCE)


def _left_behind(process: Process) -> tuple[str, int]:
    return _tail(process), oom_kills()


def _dumped(process: Process) -> str:
    before = len(_text(process))
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_DUMP)
    return _text(process)[before:].strip()


def _tail(process: Process) -> str:
    return _text(process)[-_TAIL:].strip()


def _text(process: Process) -> str:
    if process.stderr is None or not process.stderr.is_file():
        return ""
    return process.stderr.read_text(errors="replace")


def _last_line(error: RayError) -> str:
    return str(error).strip().splitlines()[-1].strip()
