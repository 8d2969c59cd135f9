"""What a Ray actor runs: the RankHost of one rank, and what a driver must know of its process."""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle

from unirl.config.environment import keep_to_loopback
from unirl.distributed.group import world
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import RankHost
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.plane import DataPlane

BESIDE = "beside"  # the concurrency group of Ray in which calls run beside the others


@dataclasses.dataclass(frozen=True)
class Process:
    """Where a rank runs.

    node, address: Ray's id of the node and its IP
    stderr:        file that the process writes its standard error to; None where the system does not tell
    oom_kills:     processes that the node's kernel had killed for want of memory when this one started
    """

    node: str
    address: str
    pid: int
    stderr: Path | None
    oom_kills: int


@dataclasses.dataclass(frozen=True)
class Said:
    """What a worker logged or printed: level and logger of `logging`; a print has the level 0."""

    level: int
    logger: str
    text: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """error: as it was raised, or a RuntimeError that tells it where it cannot be sent; at: time of the node's clock"""

    error: BaseException
    traceback: str
    at: float

    @property
    def deserted(self) -> bool:
        """Whether it failed in talking to another rank, which then is the one to look at."""
        return isinstance(self.error, torch.distributed.DistError) or "gloo" in str(self.error)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank, and what was said meanwhile."""

    value: Any = None
    failure: Failure | None = None
    said: tuple[Said, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the values of a Call are told apart when they travel one by one, so that Ray resolves what was put."""

    positional: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, call: Call) -> tuple[Shape, list[Any]]:
        return cls(len(call.args), tuple(call.kwargs)), [*call.args, *call.kwargs.values()]

    def call(self, values: tuple[Any, ...]) -> Call:
        return Call(values[: self.positional], dict(zip(self.names, values[self.positional :], strict=True)))


class RankActor:
    """One rank. Ray runs methods in two threads, the default one and BESIDE, in each one at a time, in the order in
    which they were sent. The main thread takes calls in and runs none, so that a worker cannot handle signals.
    """

    def __init__(self, slab: str, rank_info: RankInfo, plane: DataPlane, log_level: int) -> None:
        self._slab, self._rank_info = slab, rank_info
        self._host = RankHost(slab, rank_info, plane)
        self._joined = False
        self._said: list[Said] = []
        self._handing_over = threading.Lock()
        logging.getLogger().setLevel(log_level)
        logging.getLogger().addHandler(_Listening(self._said))
        logging.captureWarnings(True)
        self._printed = sys.stdout, sys.stderr = _Lines(self._said), _Lines(self._said)
        faulthandler.register(signal.SIGUSR1, file=2)

    def process(self) -> Outcome:
        """Process: this one."""
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return self._outcome(lambda: Process(node, address, os.getpid(), _stderr_file(), oom_kills()))

    def rendezvous(self, one_node: bool) -> Outcome:
        """str: where the ranks find each other, asked of rank 0."""
        return self._outcome(lambda: _rendezvous_file(self._slab) if one_node else _rendezvous_port())

    def join(self, rendezvous: str, device_type: str, timeout: float) -> Outcome:
        """Start torch.distributed."""

        def run() -> None:
            if rendezvous.startswith("file:"):
                keep_to_loopback()
            world.join(self._rank_info, rendezvous, device_type=device_type, timeout=timeout)
            self._joined = True

        return self._outcome(run)

    def build(self, key: int, remote: type[Remote], shape: Shape, *values: Any) -> Outcome:
        """`RankHost.build`."""
        return self._outcome(lambda: self._host.build(key, remote, shape.call(values)))

    def call(self, key: int, method: str, shape: Shape, *values: Any) -> Outcome:
        """`RankHost.call`."""
        return self._outcome(lambda: self._host.call(key, method, shape.call(values)))

    def retire(self) -> Outcome:
        """`RankHost.retire`."""
        return self._outcome(self._host.retire)

    def close(self) -> Outcome:
        """`RankHost.close`, and leave the others."""

        def run() -> None:
            try:
                self._host.close()
            finally:
                if self._joined:
                    world.leave()

        return self._outcome(run)

    def _outcome(self, run: Callable[[], Any]) -> Outcome:
        value, failure = None, None
        try:
            value = run()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again by the driver, whatever it is
            failure = Failure(_portable(error), "".join(traceback.format_exception(error)), time.time())
        for stream in self._printed:
            stream.end()
        with self._handing_over:  # what threads say at the same time is kept for the call that ends next
            said = tuple(self._said)
            del self._said[: len(said)]
        return Outcome(value, failure, said)


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for want of memory; 0 where it does not tell."""
    counters = Path("/proc/vmstat")
    if not counters.is_file():
        return 0
    lines = (line.split() for line in counters.read_text().splitlines())
    return sum(int(count) for name, count in lines if name == "oom_kill")


def _portable(error: BaseException) -> BaseException:
    """`error` where the driver can read it: an exception whose constructor wants more than its args cannot be."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a class of the user's does when it is copied
        told = RuntimeError(f"{type(error).__name__}: {error}")
        vars(told).update({name: value for name, value in vars(error).items() if name == "__notes__"})
        return told
    return error


def _rendezvous_file(slab: str) -> str:
    stderr = _stderr_file()
    folder = Path("/tmp") if stderr is None else stderr.parent  # with the logs of Ray's session, and as short-lived
    return f"file://{folder}/unirl-{slab}-{uuid.uuid4().hex}"


def _rendezvous_port() -> str:
    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        return f"tcp://{address}:{free.getsockname()[1]}"


def _stderr_file() -> Path | None:
    descriptor = Path("/proc/self/fd/2")
    return Path(os.readlink(descriptor)) if descriptor.is_symlink() else None


class _Listening(logging.Handler):
    def __init__(self, said: list[Said]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(Said(record.levelno, record.name, self.format(record)))


class _Begun(threading.local):
    """Of each thread, the line that it has not ended yet."""

    line: str = ""


class _Lines(io.TextIOBase):
    """Keeps what is printed, line by line; of a line that was rewritten in place, what it was in the end."""

    def __init__(self, said: list[Said]) -> None:
        self._said = said
        self._begun = _Begun()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun.line = (self._begun.line + text).split("\n")
        for line in lines:
            self._tell(line)
        return len(text)

    def end(self) -> None:
        """Keep a last line of this thread without an end, too."""
        if self._begun.line:
            self._tell(self._begun.line)
        self._begun.line = ""

    def _tell(self, line: str) -> None:
        self._said.append(Said(0, "", line.rstrip("\r").rpartition("\r")[2]))
