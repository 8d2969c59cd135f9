"""Which steps are stochastic. The last one never is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.steps import AllSteps, FirstFraction, ListedSteps, NoSteps, RandomSteps, StepRule, WindowSteps

MOVES: tuple[Literal["progressive", "random", "decay", "exp_decay"], ...] = (
    "progressive",
    "random",
    "decay",
    "exp_decay",
)


def test_all_steps_leave_the_last_deterministic() -> None:
    assert AllSteps().indices(10, 0) == tuple(range(9))
    assert AllSteps().indices(1, 0) == ()


def test_no_steps_are_an_ode() -> None:
    assert NoSteps().indices(10, 3) == ()


@pytest.mark.parametrize("steps", [tuple(range(10)), (8, 9), (9,)], ids=str)
def test_asking_for_the_last_step_is_an_error_that_says_so(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"SDE step 9 is the last of 10 steps \(sigma_next = 0\).* choose from 0\.\.8"):
        ListedSteps(steps).indices(10, 0)


@pytest.mark.parametrize(("steps", "named"), [((-1,), -1), ((10,), 10), ((0, 11), 11)])
def test_a_step_outside_the_schedule_is_an_error(steps: tuple[int, ...], named: int) -> None:
    with pytest.raises(ValueError, match=rf"SDE step {named} is outside 0\.\.8 of 10 steps"):
        ListedSteps(steps).indices(10, 0)


def test_listed_steps_are_sorted_and_may_be_none() -> None:
    assert ListedSteps((4, 0, 2)).indices(10, 5) == (0, 2, 4)
    assert ListedSteps(()).indices(10, 0) == ()


def test_a_step_listed_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"SDE steps \[2, 1, 2\] name a step twice"):
        ListedSteps((2, 1, 2)).indices(10, 0)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 9), (0.99, 9), (0.95, 9), (0.5, 5), (0.1, 1)])
def test_a_fraction_is_of_the_first_steps(fraction: float, expected: int) -> None:
    assert FirstFraction(fraction).indices(10, 0) == tuple(range(expected))


def test_a_fraction_of_no_whole_step_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a fraction of 0\.05 of 10 steps is no whole step"):
        FirstFraction(0.05).indices(10, 0)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_lies_between_zero_and_one(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\]"):
        FirstFraction(fraction)


def test_random_steps_are_drawn_anew_each_rollout_and_the_same_again() -> None:
    rule = RandomSteps(count=3, seed=1)
    drawn = [rule.indices(10, rollout) for rollout in range(50)]
    assert drawn == [rule.indices(10, rollout) for rollout in range(50)]
    assert len(set(drawn)) > 20
    assert {step for steps in drawn for step in steps} == set(range(9))
    assert drawn != [dataclasses.replace(rule, seed=2).indices(10, rollout) for rollout in range(50)]


def test_random_steps_come_from_their_pool() -> None:
    drawn = {RandomSteps(count=1, pool=(2, 5)).indices(10, rollout) for rollout in range(50)}
    assert drawn == {(2,), (5,)}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RandomSteps(count=0), "cannot draw 0 SDE steps from a pool of 9"),
        (RandomSteps(count=10), "cannot draw 10 SDE steps from a pool of 9"),
        (RandomSteps(count=3, pool=(0, 1)), "cannot draw 3 SDE steps from a pool of 2"),
        (RandomSteps(count=1, pool=(9,)), "SDE step 9 is the last of 10 steps"),
        (WindowSteps(size=10), "a window of 10 steps from step 0 does not fit the 9 stochastic steps"),
        (WindowSteps(size=4, start=6), "a window of 4 steps from step 6 does not fit the 9 stochastic steps"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_schedule_is_an_error(rule: StepRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule.indices(10, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "a window needs a size of at least 1, got 0"),
        ({"size": 2, "overlap": 2}, r"overlap must be in \[0, size\), got overlap=2, size=2"),
        ({"size": 2, "overlap": -1}, r"overlap must be in \[0, size\)"),
        ({"size": 2, "rollouts_per_window": 0}, "a window must stay at least 1 rollout"),
        ({"size": 2, "min_rollouts": 0}, "a window must stay at least 1 rollout"),
        ({"size": 2, "start": -1}, "start must not be negative, got -1"),
        ({"size": 2, "move": "decay", "min_rollouts": 3}, "min_rollouts must not exceed the longest stay"),
    ],
    ids=str,
)
def test_a_window_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowSteps(**settings)  # type: ignore[arg-type]


def test_a_window_stays_then_moves_by_what_does_not_overlap() -> None:
    rule = WindowSteps(size=4, overlap=1, rollouts_per_window=2)
    walked = [rule.indices(11, rollout)[0] for rollout in range(8)]
    assert walked == [0, 0, 3, 3, 6, 6, 0, 0]


def test_at_the_end_a_window_starts_again_or_stays() -> None:
    settings = {"size": 3, "overlap": 2, "start": 1}
    rolling, staying = WindowSteps(**settings), WindowSteps(**settings, roll_back=False)  # type: ignore[arg-type]
    assert [rolling.indices(7, rollout)[0] for rollout in range(8)] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert [staying.indices(7, rollout)[0] for rollout in range(8)] == [1, 2, 3, 3, 3, 3, 3, 3]


def test_a_decaying_window_stays_less_and_less() -> None:
    rule = WindowSteps(size=1, move="decay", rollouts_per_window=4, min_rollouts=1)
    walked = [rule.indices(5, rollout)[0] for rollout in range(12)]
    # Stays of 4, 3, 2, 1 at positions 0, 1, 2, 3 of 4: int(4 - 3 p / 4).
    assert walked == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 0, 0]


@given(steps=st.integers(2, 40), rollout=st.integers(0, 10**6), data=st.data())
def test_every_window_is_full_sorted_and_before_the_last_step(steps: int, rollout: int, data: st.DataObject) -> None:
    size, move = data.draw(st.integers(1, steps - 1)), data.draw(st.sampled_from(MOVES))
    ordered = {
        "overlap": data.draw(st.integers(0, size - 1)),
        "rollouts_per_window": data.draw(st.integers(1, 5)),
        "roll_back": data.draw(st.booleans()),
    }
    start = data.draw(st.integers(0, steps - 1 - size))
    rule = WindowSteps(size=size, move=move, start=start, **({} if move == "random" else ordered))
    window = rule.indices(steps, rollout)
    assert window == tuple(range(window[0], window[0] + size))
    assert rule.start <= window[0]
    assert window[-1] < steps - 1
    assert window == rule.indices(steps, rollout)


@pytest.mark.parametrize("move", MOVES)
def test_the_order_of_questions_does_not_matter(move: str) -> None:
    """A resumed run, or another rank, asks for one rollout alone."""
    ordered = {} if move == "random" else {"overlap": 2, "rollouts_per_window": 2}
    rule = WindowSteps(size=3, move=move, **ordered)  # type: ignore[arg-type]
    forwards = [rule.indices(12, rollout) for rollout in range(40)]
    assert [rule.indices(12, rollout) for rollout in reversed(range(40))] == forwards[::-1]


def test_a_random_window_refuses_settings_of_an_ordered_walk() -> None:
    with pytest.raises(ValueError, match="leave overlap, rollouts_per_window and roll_back"):
        WindowSteps(size=2, move="random", overlap=1)
