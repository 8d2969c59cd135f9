"""Scorers that do to their process what `text` says; apart from the tests, so that a process imports no torch."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from unirl.reward.scorer import Scorer, ScorerInput, Unscored


@dataclasses.dataclass(frozen=True)
class Stubborn(Scorer):
    """The number that the text is, or the deed that it names."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [_obey(sample.written) for sample in samples]


@dataclasses.dataclass(frozen=True)
class Impatient(Stubborn):
    time_limit: ClassVar[float | None] = 1.5


@dataclasses.dataclass(frozen=True)
class Broken(Scorer):
    """Breaks the contract, or does not start."""

    fault: str

    def prepare(self) -> None:
        if self.fault == "raise":
            raise OSError("no weights")
        if self.fault == "exit":
            os._exit(7)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [1.0] * (len(samples) + 1)


def _obey(text: str) -> float:
    deed, _, rest = text.partition(" ")
    return DEEDS[deed](rest) if deed in DEEDS else float(text)


def _spin(how: str) -> float:
    if how == "in C":  # catastrophic backtracking: the interpreter's lock is never given back
        re.match(r"(a+)+$", "a" * 60 + "b")
    if how == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def _start_a_child(file: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    return _spin("")


def _exit(code: str) -> float:
    os._exit(int(code))


def _raise(message: str) -> float:
    raise ValueError(message)


def _fault(_: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


DEEDS: dict[str, Callable[[str], float]] = {
    "spin": _spin,
    "start": _start_a_child,
    "exit": _exit,
    "raise": _raise,
    "fault": _fault,
    "unscored": Unscored,
    "pid": lambda _: float(os.getpid()),
    "torch": lambda _: float("torch" in sys.modules),
}
