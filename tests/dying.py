"""A judge in whose ranks SIGKILL strikes, as the kernel does where memory runs out."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from pathlib import Path

from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.digits import DigitJudge


@dataclasses.dataclass(frozen=True)
class DyingJudge(Scorer):
    """`DigitJudge`. Deaths are counted in `folder`, which all ranks see.

    at_calls: of all ranks together, the calls that kill their rank
    lives:    mean seconds that a rank lives from its first call on, None for ever; deaths: at most so many of those
    """

    folder: Path
    at_calls: tuple[int, ...] = ()
    lives: float | None = None
    deaths: int = 0
    judge: DigitJudge = dataclasses.field(default_factory=DigitJudge)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        call = len(list(self.folder.glob("call-*"))) + 1
        self._mark(f"call-{call}-{os.getpid()}")
        if call in self.at_calls:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.lives is not None and not any(thread.name == "death" for thread in threading.enumerate()):
            death = threading.Timer(random.Random(call).expovariate(1 / self.lives), self._die)
            death.name, death.daemon = "death", True
            death.start()
        return self.judge.score(samples)

    def _die(self) -> None:
        if len(list(self.folder.glob("death-*"))) < self.deaths:
            self._mark(f"death-{os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def _mark(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).touch()
