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
    """`DigitJudge`. Calls are counted in `folder`, which all ranks see: after a restart they go on.

    at_calls: of all ranks together, the calls that kill their rank
    chance:   that a call is followed by its rank's death, at any moment of the next second
    """

    folder: Path
    at_calls: tuple[int, ...] = ()
    chance: float = 0.0
    judge: DigitJudge = dataclasses.field(default_factory=DigitJudge)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        call = len(list(self.folder.glob("call-*"))) + 1
        self._mark(f"call-{call}-{os.getpid()}")
        if call in self.at_calls:
            os.kill(os.getpid(), signal.SIGKILL)
        draws = random.Random(call)
        if draws.random() < self.chance:
            death = threading.Timer(draws.random(), os.kill, (os.getpid(), signal.SIGKILL))
            death.daemon = True
            death.start()
        return self.judge.score(samples)

    def _mark(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).touch()
