"""Seconds per phase of a step, and an estimate of the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unirl.observability.metrics import SECONDS

# Long enough to hold the occasional evaluation and save, short enough to follow a change of pace.
_LAPS_REMEMBERED = 50


class PhaseTimer:
    """Times the phases of a step::

        with timer("rollout"):
            sample = rollout.generate(request)
        with timer("train"):
            metrics = stack.train(part)
        timer.lap()    # {"seconds/rollout": 0.07, "seconds/train": 0.18, "seconds/step": 0.26}

    A phase inside a phase counts as itself alone, so phases never add up to more than the step. Work that a phase only
    queues on an accelerator counts where it is waited for.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._lap_start = self._mark = clock()
        self._first = True
        self._laps: deque[float] = deque(maxlen=_LAPS_REMEMBERED)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time inside to `phase`, also when it raises."""
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        """End the step: its `seconds/<phase>`, and `seconds/step` since the lap before."""
        assert not self._open, f"a step ends inside its phases {self._open}"
        now = self._clock()
        seconds = {f"{SECONDS}{phase}": value for phase, value in self._seconds.items()}
        seconds[f"{SECONDS}step"] = now - self._lap_start
        # The first lap warms up (compiles, allocates) and tells little about the next ones.
        if self._first:
            self._first = False
        else:
            self._laps.append(now - self._lap_start)
        self._lap_start, self._seconds = now, {}
        return seconds

    def left(self, steps: int) -> float | None:
        """Seconds that `steps` more steps will take at the pace of the last ones; None before there is a pace."""
        if not self._laps:
            return None
        return steps * sum(self._laps) / len(self._laps)

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now
