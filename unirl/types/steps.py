"""Which denoising steps are stochastic: pure functions of the rollout number.

A schedule of T steps has transitions 0 .. T-1; the last one (sigma_next = 0) is always deterministic, so a rule picks
from [0, T-1). A window's position depends on the rollout number alone and is thus the same after a resume and on every
rank.
"""

from __future__ import annotations

import dataclasses
import math
import random
from abc import ABC, abstractmethod
from typing import Literal


class StepRule(ABC):
    """Picks the stochastic steps of a rollout."""

    @abstractmethod
    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        """Sorted step indices in [0, num_steps - 1)."""


@dataclasses.dataclass(frozen=True)
class AllSteps(StepRule):
    """Every step but the last."""

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        return tuple(range(num_steps - 1))


@dataclasses.dataclass(frozen=True)
class NoSteps(StepRule):
    """A deterministic (ODE) rollout without log-probs, as forward-process algorithms and evaluation use it."""

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class ListedSteps(StepRule):
    """Exactly these steps."""

    steps: tuple[int, ...]

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        for step in self.steps:
            if step == num_steps - 1:
                raise ValueError(
                    f"SDE step {step} is the last of {num_steps} steps (sigma_next = 0), which is always "
                    f"deterministic; choose from 0..{num_steps - 2}"
                )
            if not 0 <= step < num_steps:
                raise ValueError(f"SDE step {step} is outside 0..{num_steps - 2} of {num_steps} steps")
        if len(set(self.steps)) != len(self.steps):
            raise ValueError(f"SDE steps {list(self.steps)} name a step twice")
        return tuple(sorted(self.steps))


@dataclasses.dataclass(frozen=True)
class FirstFraction(StepRule):
    """The first `int(fraction * T)` steps, the last one always left out (Flow-GRPO's `timestep_fraction`)."""

    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        count = int(self.fraction * num_steps)
        if count < 1:
            raise ValueError(
                f"a fraction of {self.fraction} of {num_steps} steps is no whole step; NoSteps says so openly"
            )
        return tuple(range(min(count, num_steps - 1)))


@dataclasses.dataclass(frozen=True)
class RandomSteps(StepRule):
    """`count` steps drawn without replacement from a pool (default: every step but the last), anew each rollout."""

    count: int
    pool: tuple[int, ...] | None = None
    seed: int = 0

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        pool = AllSteps().indices(num_steps, 0) if self.pool is None else ListedSteps(self.pool).indices(num_steps, 0)
        if not 0 < self.count <= len(pool):
            raise ValueError(f"cannot draw {self.count} SDE steps from a pool of {len(pool)}: {list(pool)}")
        return tuple(sorted(_keyed(self.seed, rollout_id).sample(pool, self.count)))


@dataclasses.dataclass(frozen=True)
class WindowSteps(StepRule):
    """A window of `size` consecutive steps that moves over the schedule (MixGRPO, arXiv 2507.21802).

    move:      progressive   stays `rollouts_per_window` rollouts, then moves by `size - overlap`
               decay         progressive whose stay falls linearly from `rollouts_per_window` to `min_rollouts`
               exp_decay     progressive whose stay falls exponentially with the position beyond `decay_threshold`
               random        a new position every rollout, drawn from `seed`
    roll_back: at the end of the schedule start again at `start`; otherwise stay in the last full window
    """

    size: int
    move: Literal["progressive", "random", "decay", "exp_decay"] = "progressive"
    overlap: int = 0
    rollouts_per_window: int = 1
    min_rollouts: int = 1
    decay_rate: float = 0.1
    decay_threshold: int = 13
    start: int = 0
    roll_back: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a window needs a size of at least 1, got {self.size}")
        if self.move == "random" and (self.overlap, self.rollouts_per_window, self.roll_back) != (0, 1, True):
            raise ValueError(
                "a random window moves every rollout and has no order: leave overlap, rollouts_per_window and roll_back"
            )
        if not 0 <= self.overlap < self.size:
            raise ValueError(f"overlap must be in [0, size), got overlap={self.overlap}, size={self.size}")
        if self.rollouts_per_window < 1 or self.min_rollouts < 1:
            raise ValueError(
                f"a window must stay at least 1 rollout, got rollouts_per_window={self.rollouts_per_window}, "
                f"min_rollouts={self.min_rollouts}"
            )
        if self.move == "decay" and self.min_rollouts > self.rollouts_per_window:
            raise ValueError(
                f"min_rollouts must not exceed the longest stay, got min_rollouts={self.min_rollouts}, "
                f"rollouts_per_window={self.rollouts_per_window}"
            )
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")

    def indices(self, num_steps: int, rollout_id: int) -> tuple[int, ...]:
        pool = num_steps - 1
        if self.start + self.size > pool:
            raise ValueError(
                f"a window of {self.size} steps from step {self.start} does not fit the {pool} stochastic steps of a "
                f"schedule of {num_steps} (the last step is deterministic)"
            )
        position = self._position(pool, rollout_id)
        return tuple(range(position, position + self.size))

    def _position(self, pool: int, rollout_id: int) -> int:
        last = pool - self.size
        if self.move == "random":
            return _keyed(self.seed, rollout_id).randint(self.start, last)
        positions = list(range(self.start, last + 1, self.size - self.overlap))
        stays = [self._stay(position, pool) for position in positions]
        if rollout_id >= sum(stays) and not self.roll_back:
            return positions[-1]
        left = rollout_id % sum(stays)
        for position, stay in zip(positions, stays, strict=True):
            if left < stay:
                return position
            left -= stay
        raise AssertionError("the stays of all windows add up to the cycle")

    def _stay(self, position: int, pool: int) -> int:
        longest = self.rollouts_per_window
        if self.move == "decay":
            return max(int(longest - (longest - self.min_rollouts) * position / pool), self.min_rollouts)
        if self.move == "exp_decay":
            return math.ceil(longest * math.exp(-self.decay_rate * max(position - self.decay_threshold, 0)))
        return longest


def _keyed(seed: int, rollout_id: int) -> random.Random:
    return random.Random(f"{seed}/{rollout_id}")
