"""Threads that own a scorer's device, and batches for them.

    request -> queues by scorer and picture size -> one thread: the oldest sample's queue, up to max_batch -> outcomes

A thread takes what is submitted and waits for a first sample; for company, up to `max_wait_ms`, only while a request is
on its way in. What comes while it scores is the next batch. It ends with `close`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from unirl.reward.http.other_python import OtherPython
from unirl.reward.outcome import Outcome, isolate
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.time_limit import TimeLimited

_log = logging.getLogger(__name__)
T = TypeVar("T")

_Shapes = tuple[tuple[int, ...], ...]


class QueueFull(Exception):
    """More samples are waiting than may."""


class Closed(Exception):
    """The server stops."""


class Overdue(Exception):
    """A batch takes longer than it may."""


class Stuck(Overdue):
    """Such a batch keeps the thread, which takes nothing more before it ends."""


@dataclasses.dataclass
class Ticket:
    """Samples of one request under one scorer. The future gets their outcomes, in order, when the last one is there.

    abandoned: nobody waits for them any more, and what is still in a queue is not scored
    """

    outcomes: list[Outcome | None]
    left: int
    future: Future[list[Outcome]]
    abandoned: bool = False

    def fill(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        self.left -= 1
        if self.left == 0:
            self.future.set_result([outcome for outcome in self.outcomes if outcome is not None])


@dataclasses.dataclass(frozen=True)
class _Waiting:
    sample: ScorerInput
    ticket: Ticket
    row: int
    since: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is told of a batch that is done: `outcomes` in `seconds`."""

    scorer: str
    outcomes: list[Outcome]
    seconds: float


class Lane:
    """One thread for `scorers`: none of them runs beside another.

    max_wait:      seconds for company, while `coming` says that a request is on its way in
    batch_seconds: after which a batch is overdue. Nothing stops a thread: who waits is told, who comes is not let in
    """

    def __init__(
        self,
        scorers: dict[str, Scorer | TimeLimited],
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        batch_seconds: float,
        coming: Callable[[], bool],
        done: Callable[[Batch], None],
    ) -> None:
        self.scorers, self._max_batch, self._max_wait, self._max_queue = scorers, max_batch, max_wait, max_queue
        self._batch_seconds, self._coming, self._done = batch_seconds, coming, done
        self._at: tuple[str, float] | None = None  # the scorer that is at a batch, and since when
        self._queues: dict[tuple[str, _Shapes], collections.deque[_Waiting]] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting, self._closed, self._changed = 0, False, threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"scorers {', '.join(scorers)}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Samples in the queues."""
        return self._waiting

    def overdue(self) -> str:
        """Which scorer is at a batch for too long; nothing where none is."""
        if self._seconds_left() > 0 or (at := self._at) is None:
            return ""
        return f"scorer {at[0]} is at a batch for longer than batch_seconds={self._batch_seconds:g}"

    async def outcomes(self, scorer: str, samples: list[ScorerInput]) -> list[Outcome]:
        """As `submit`; Overdue where a batch that they are in, or wait for, takes too long."""
        ticket = self.submit(scorer, samples)
        future = asyncio.wrap_future(ticket.future)
        try:
            while not future.done():
                if late := self.overdue():
                    raise Overdue(late)
                await asyncio.wait([future], timeout=self._seconds_left())
        finally:
            ticket.abandoned = True
        return future.result()

    def submit(self, scorer: str, samples: list[ScorerInput]) -> Ticket:
        """Outcomes of the samples; QueueFull where they do not fit, Stuck behind a batch, Closed after `close`."""
        if late := self.overdue():
            raise Stuck(late)
        ticket = Ticket([None] * len(samples), len(samples), Future())
        with self._changed:
            if self._closed:
                raise Closed
            if self._waiting + len(samples) > self._max_queue:
                raise QueueFull(f"{self._waiting} samples are waiting, {len(samples)} more do not fit")
            for row, sample in enumerate(samples):
                queue = self._queues.setdefault((scorer, _shapes(sample)), collections.deque())
                queue.append(_Waiting(sample, ticket, row, time.monotonic()))
            self._waiting += len(samples)
            self._changed.notify()
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What `function` returns on the thread of the scorers, when no sample waits there."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - who waits for the future gets it
                future.set_exception(error)

        with self._changed:
            if self._closed:
                raise Closed
            self._calls.append(run)
            self._changed.notify()
        return future

    def close(self, seconds: float) -> None:
        """Ends the thread after the batch it is at, or leaves it after `seconds`; what waits gets Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        for scorer in self.scorers.values():
            if isinstance(scorer, TimeLimited | OtherPython):
                scorer.close()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            name, waiting = batch
            start = time.monotonic()
            self._at = (name, start)
            outcomes = self._outcomes(name, [one.sample for one in waiting])
            self._at = None
            # Told first: who has the reply may ask for the figures.
            self._done(Batch(name, outcomes, time.monotonic() - start))
            for one, outcome in zip(waiting, outcomes, strict=True):
                one.ticket.fill(one.row, outcome)
        with self._changed:
            left = {id(one.ticket): one.ticket for queue in self._queues.values() for one in queue}
        for ticket in left.values():
            ticket.future.set_exception(Closed())

    def _next(self) -> tuple[str, list[_Waiting]] | None:
        """A batch of the queue whose first sample waits longest; None after `close`."""
        while True:
            with self._changed:
                while not self._closed and not self._queues and not self._calls:
                    self._changed.wait()
                if self._closed:
                    return None
                batch = self._taken() if self._queues else None
                call = None if batch else self._calls.popleft()
            if call is not None:
                call()
            elif batch is not None and batch[1]:
                return batch

    def _taken(self) -> tuple[str, list[_Waiting]]:
        """Under the lock; a batch whose samples are all abandoned is empty."""
        key = min(self._queues, key=lambda key: self._queues[key][0].since)
        queue = self._queues[key]
        due = queue[0].since + self._max_wait
        while len(queue) < self._max_batch and self._coming() and not self._closed:
            if (left := due - time.monotonic()) <= 0:
                break
            self._changed.wait(left)
        batch = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
        if not queue:
            del self._queues[key]
        self._waiting -= len(batch)
        return key[0], [one for one in batch if not one.ticket.abandoned]

    def _seconds_left(self) -> float:
        """For the batch that it is at, or would be."""
        at = self._at
        return self._batch_seconds if at is None else at[1] + self._batch_seconds - time.monotonic()

    def _outcomes(self, name: str, samples: list[ScorerInput]) -> list[Outcome]:
        scorer = self.scorers[name]
        try:
            return scorer.score(samples) if isinstance(scorer, TimeLimited) else isolate(name, scorer, samples)
        except Exception as error:  # noqa: BLE001 - a broken contract, a process that does not start: told, not fatal
            _log.error("%s", error)
            return [Outcome(math.nan, f"{type(error).__name__}: {error}", error) for _ in samples]


def _shapes(sample: ScorerInput) -> _Shapes:
    """Samples of other sizes share no batch: many models cannot take them together."""
    return tuple(array.shape for array in (sample.image, sample.video, sample.audio) if array is not None)
