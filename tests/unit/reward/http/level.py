"""A scorer that tests serve; it imports little, since processes of a time limit start with it."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time

from unirl.reward.scorer import Scorer, ScorerInput, Unscored


@dataclasses.dataclass(frozen=True)
class Level(Scorer):
    """The level of the first pixel / 7; levels of `bad` raise, 200 has no score, 201 is infinite, 202 spins."""

    bad: tuple[int, ...] = ()
    seconds: float = 0.0
    calls: list[int] = dataclasses.field(default_factory=list, init=False)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        self.calls.append(len(samples))
        time.sleep(self.seconds)
        levels = [int(sample.picture[0, 0, 0]) for sample in samples]
        if set(levels) & set(self.bad):
            raise RuntimeError("a bad level")
        while 202 in levels:
            pass
        return [{200: Unscored("no level"), 201: math.inf}.get(level, level / 7) for level in levels]


@dataclasses.dataclass(frozen=True)
class Process(Scorer):
    """The id of the process, where it runs under the prefix that the text names; "end" ends it, "spin" spins."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        if any(sample.text == "end" for sample in samples):
            os._exit(3)
        while any(sample.text == "spin" for sample in samples):
            pass
        return [float(os.getpid()) if sample.text == sys.prefix else 0.0 for sample in samples]
