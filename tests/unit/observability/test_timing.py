"""Seconds per phase, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from unirl.observability.timing import PhaseTimer


class Clock:
    """Tells the time it was set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lap_tells_its_phases_and_the_whole_step() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer("rollout"):
        clock.now += 2
    clock.now += 1
    with timer("train"):
        clock.now += 4
    with timer("rollout"):
        clock.now += 0.5
    assert timer.lap() == {"seconds/rollout": 2.5, "seconds/train": 4, "seconds/step": 7.5}
    clock.now += 3
    assert timer.lap() == {"seconds/step": 3}


def test_a_phase_inside_a_phase_counts_once() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer("train"):
        clock.now += 1
        with timer("rollout"):
            clock.now += 10
        clock.now += 2
    assert timer.lap() == {"seconds/rollout": 10, "seconds/train": 3, "seconds/step": 13}


def test_a_phase_that_raises_is_still_charged() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)

    def fail() -> None:
        clock.now += 2
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), timer("reward"):
        fail()
    assert timer.lap() == {"seconds/reward": 2, "seconds/step": 2}


def test_the_time_left_follows_the_laps_after_the_first() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    assert timer.left(10) is None
    for seconds in (60, 2, 4):
        clock.now += seconds
        timer.lap()
    assert timer.left(10) == 30
    assert timer.left(0) == 0


def test_the_time_left_forgets_laps_of_long_ago() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for seconds in (1, *[100] * 20, *[2] * 50):
        clock.now += seconds
        timer.lap()
    assert timer.left(3) == 6


def test_a_step_cannot_end_inside_a_phase() -> None:
    timer = PhaseTimer(Clock())
    with timer("train"), pytest.raises(AssertionError, match="train"):
        timer.lap()
