"""A scorer in processes of its own, where a sample that takes too long can be stopped.

    samples -> one at a time to each process -> outcome, or SIGKILL at the deadline and a fresh process -> outcomes

Neither a thread nor a signal handler stops a regular expression or a large power: the end of the process does.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from unirl.reward.outcome import BrokenScorerError, Outcome
from unirl.reward.scorer import Scorer, ScorerInput

_log = logging.getLogger(__name__)
_START_SECONDS = 300.0  # for imports and models, which are no sample's fault
_END_SECONDS = 30.0  # for a process that was killed to be gone


def check_time_limit(scorer: Scorer, time_limit: float | None, processes: int) -> None:
    """ValueError for settings that cannot be, and for a scorer that cannot go to another process where it would."""
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise ValueError(f"time_limit must be positive seconds, or null for none, got {time_limit}")
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    if time_limit is not None or scorer.time_limit is not None:
        _check_sendable(scorer)
    elif processes > 1:
        raise ValueError(f"processes={processes} takes effect under a time_limit only: give one, in seconds")


def _check_sendable(scorer: Scorer) -> None:
    kind = type(scorer)
    try:
        pickle.dumps(scorer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"a time limit runs {kind.__name__} in another process, and it cannot go there: {error}"
        ) from None
    if kind.__module__ == "__main__":
        raise ValueError(
            f"a time limit runs {kind.__name__} in another process, which cannot import it from the main program: "
            "define it in a module"
        )


class TimeLimited:
    """`scorer` in up to `processes` processes, kept between calls; a sample may take `seconds` there.

    One that takes longer is stopped with its process, and a fresh one scores the rest; so it is with one that ends its
    process. No process outlives `close`, this object or Python; where Python is killed, they end within `seconds + 5`.
    """

    def __init__(self, name: str, scorer: Scorer, seconds: float, processes: int = 1) -> None:
        self._name, self._scorer, self._seconds, self._processes = name, scorer, seconds, processes
        self._workers: list[_Worker] = []

    def score(self, samples: list[ScorerInput]) -> list[Outcome]:
        """An outcome per sample, in order; BrokenScorerError as `isolate`, RuntimeError where no process comes up."""
        outcomes: dict[int, Outcome] = {}
        waiting = collections.deque(range(len(samples)))
        try:
            while len(outcomes) < len(samples):
                self._bring_up(len(samples) - len(outcomes))
                for worker in self._workers:
                    if worker.row is None and waiting:
                        row = waiting.popleft()
                        worker.give(row, samples[row], self._seconds)
                for worker in self._done_or_late():
                    row = worker.row
                    assert row is not None
                    outcomes[row] = self._outcome(worker, samples[row])
        except BaseException:
            self.close()  # what is in work must not answer the next call
            raise
        return [outcomes[row] for row in range(len(samples))]

    def close(self) -> None:
        """End the processes; a later `score` starts others."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _bring_up(self, left: int) -> None:
        """As many live workers as `left` samples can use."""
        for worker in [worker for worker in self._workers if worker.died_idle()]:
            _log.warning("scorer %s: an idle process ended (%s)", self._name, worker.exit_status())
            self._end(worker)
        fresh = [_Worker() for _ in range(min(self._processes, left) - len(self._workers))]
        self._workers += fresh
        for worker in fresh:
            worker.begin(self._name, self._scorer, self._seconds)
        for worker in fresh:
            worker.wait_until_ready(self._name)

    def _done_or_late(self) -> list[_Worker]:
        """Waits for the first answer or deadline."""
        busy = [worker for worker in self._workers if worker.row is not None]
        patience = min(worker.deadline for worker in busy) - time.monotonic()
        answered = wait([worker.connection for worker in busy], max(0.0, patience))
        return [worker for worker in busy if worker.connection in answered or time.monotonic() >= worker.deadline]

    def _outcome(self, worker: _Worker, sample: ScorerInput) -> Outcome:
        """What the worker answered; the worker is free then, or ended."""
        if not worker.connection.poll():
            self._end(worker)
            return self._stopped(sample, f"not scored within the time limit of {self._seconds:g} s")
        answer = worker.answer()
        if answer is None:
            status = worker.exit_status()
            self._end(worker)
            return self._stopped(sample, f"the process that scored it ended ({status})")
        if "failure" in answer:
            raise BrokenScorerError(answer["failure"])
        error = RuntimeError(f"in the process of the scorer:\n{answer['raised']}") if answer["raised"] else None
        return Outcome(answer["value"], answer["cause"], error)

    def _stopped(self, sample: ScorerInput, why: str) -> Outcome:
        return Outcome(math.nan, f"{self._name}: {sample.id}: {why}")

    def _end(self, worker: _Worker) -> None:
        worker.stop()
        self._workers.remove(worker)


class _Worker:
    """One process. `row` is the sample that it is at, due by `deadline`; None while it is idle."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.row: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS
        # Not multiprocessing: its spawn runs the main program anew in the child, a script without a guard from its top.
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unirl.reward.scorer_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # what the scorer starts goes with it
            )
        self.stop = weakref.finalize(self, _end_process, self._process, self.connection)

    def begin(self, name: str, scorer: Scorer, seconds: float) -> None:
        self._send((name, scorer, seconds))

    def wait_until_ready(self, name: str) -> None:
        in_time = self.connection.poll(max(0.0, self.deadline - time.monotonic()))
        answer = self.answer() if in_time else {"failure": f"not ready after {_START_SECONDS:g} s"}
        if answer is None:
            answer = {"failure": f"it ended ({self.exit_status()})"}
        if answer:
            raise RuntimeError(f"scorer {name} does not start in a process of its own: {answer['failure']}")

    def give(self, row: int, sample: ScorerInput, seconds: float) -> None:
        self._send(sample)
        self.row, self.deadline = row, time.monotonic() + seconds

    def answer(self) -> dict[str, Any] | None:
        """What it sent, and it is idle; None where it has ended instead."""
        self.row = None
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def died_idle(self) -> bool:
        """Whether there is something to read, which can be the end only."""
        return self.row is None and self.connection.poll()

    def exit_status(self) -> str:
        """Of a process that has closed its connection: "exit code 3", "SIGKILL"."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "connection closed"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _send(self, request: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: reading from it will tell
            self.connection.send(request)


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, with all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_SECONDS)
