"""Workers that say where they run, talk, fail, hang and die: what tests of launchers spawn, importable in a rank."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any, ClassVar

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote, remote
from unirl.distributed.group.world import World
from unirl.types.media import Media
from unirl.types.metric import Metrics, total

WAIT = 60.0


class Base(Remote):
    """The sibling of Worker."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark
        self.at_birth = self.rank_info

    @remote(Dispatch.BROADCAST)
    def check_birth(self) -> RankInfo:
        assert self.at_birth == self.rank_info
        return self.at_birth


class Worker(Remote):
    """others: siblings inside containers"""

    def __init__(self, base: Base, *others: Any) -> None:
        self.base, self.others = base, others
        self.world = World.of(self.rank_info, "cpu")
        self.seen: list[str] = []

    @remote(Dispatch.DP_SCATTER)
    def shout(self, batch: Media, mark: str = "") -> Media:
        assert batch.texts is not None
        self.seen += batch.texts
        return Media(texts=[f"{text.upper()}{mark}{self.base.mark}@{self.rank_info.rank}" for text in batch.texts])

    @remote(Dispatch.DP_COLLECTIVE)
    def count(self, batch: Media | None) -> Metrics | None:
        """Rows of all ranks, as each of them learns it."""
        rows = self.world.total([0 if batch is None else len(batch)])[0]
        return None if batch is None else {"rows": total(rows)}

    @remote(Dispatch.BROADCAST)
    def ranks(self) -> Metrics:
        return {"ranks": total(self.world.total([1.0])[0]), "processes": total(1)}

    @remote(Dispatch.RANK_ZERO)
    def order(self) -> tuple[str, ...]:
        return tuple(self.seen)

    @remote(Dispatch.RANK_ZERO)
    def sibling_is_mine(self) -> bool:
        return self.others[0][0] is self.base and self.others[1]["base"] is self.base

    @remote(Dispatch.BROADCAST)
    def mean_of(self, values: torch.Tensor) -> Metrics:
        return {"mean": total(float(values.double().mean()))}

    @remote(Dispatch.BROADCAST)
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        logging.getLogger("tests.voice").warning("%s, louder", text)

    @remote(Dispatch.BROADCAST)
    def variable(self, name: str) -> str:
        return os.environ[name]

    @remote(Dispatch.RANK_ZERO)
    def process(self) -> int:
        return os.getpid()

    @remote(Dispatch.BROADCAST)
    def fail(self, ranks: tuple[int, ...], *, after: tuple[float, ...] = (0, 0), then_meet: bool = False) -> None:
        """Raise on some ranks; the others return, or wait for them in a collective."""
        if self.rank_info.rank in ranks:
            time.sleep(after[self.rank_info.rank])
            raise FloatingPointError(f"loss of rank {self.rank_info.rank} is NaN")
        if then_meet:
            self.world.total([1.0])

    @remote(Dispatch.BROADCAST)
    def fail_unsendably(self) -> None:
        raise Unsendable("one", "two")

    @remote(Dispatch.BROADCAST)
    def die(self, rank: int, by: signal.Signals) -> None:
        """One rank is killed while the others wait for it."""
        if self.rank_info.rank == rank:
            signal.raise_signal(by)  # to this thread, as a crash is
        self.world.total([1.0])

    @remote(Dispatch.BROADCAST)
    def leave(self, rank: int) -> None:
        if self.rank_info.rank == rank:
            sys.exit(3)

    @remote(Dispatch.BROADCAST)
    def hang(self, rank: int) -> None:
        if self.rank_info.rank == rank:
            self._sleep_for_ever()

    def _sleep_for_ever(self) -> None:
        time.sleep(10_000)


class Aside(Remote):
    """Its calls run beside those of a Partner."""

    beside: ClassVar[bool] = True

    def __init__(self, *others: Aside) -> None:
        self.others = others
        self.came, self.partner_came = threading.Event(), threading.Event()
        self.seen: list[str] = []

    @remote(Dispatch.BROADCAST)
    def meet(self) -> Metrics:
        """Wait for the partner on this rank."""
        return _met(self.came, self.partner_came)

    @remote(Dispatch.BROADCAST)
    def rest(self, seconds: float) -> None:
        """The partner need not wait for it."""
        self.came.set()
        time.sleep(seconds)

    @remote(Dispatch.BROADCAST)
    def note(self, text: str) -> None:
        self.seen.append(text)

    @remote(Dispatch.RANK_ZERO)
    def order(self) -> tuple[str, ...]:
        return tuple(self.seen)

    @remote(Dispatch.BROADCAST)
    def fail(self) -> None:
        raise ArithmeticError("a score is NaN")

    @remote(Dispatch.BROADCAST)
    def hang(self, rank: int) -> None:
        if self.rank_info.rank == rank:
            _sleep_aside()


class Partner(Worker):
    """A Worker that meets its last sibling, an Aside."""

    @remote(Dispatch.BROADCAST)
    def meet(self) -> Metrics:
        """Meet the other ranks, then wait for the sibling on this one."""
        self.world.total([1.0])
        return _met(self.others[-1].partner_came, self.others[-1].came)


def _met(mine: threading.Event, other: threading.Event) -> Metrics:
    mine.set()
    came = other.wait(WAIT)
    other.clear()
    return {"met": total(float(came))}


def _sleep_aside() -> None:
    time.sleep(10_000)


class Unsendable(Exception):
    """Its args do not make another one, so it cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
