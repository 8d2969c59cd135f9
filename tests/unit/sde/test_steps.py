"""A pinned schedule and the steps it hands out."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.sde.steps import Schedule

SCHEDULE = Schedule(torch.tensor([1.0, 0.75, 0.5, 0.0]), torch.tensor([1000.0, 750.0, 500.0]))


def test_every_row_has_a_step_of_its_own() -> None:
    step = SCHEDULE.at(torch.tensor([2, 0, 1, 1]))
    assert step.index.tolist() == [2, 0, 1, 1]
    assert step.sigma.tolist() == [0.5, 1.0, 0.75, 0.75]
    assert step.sigma_next.tolist() == [0.0, 0.75, 0.5, 0.5]
    assert step.time.tolist() == [500, 1000, 750, 750]
    assert len(SCHEDULE) == 3


def test_only_a_first_step_from_pure_noise_takes_the_next_sigma_as_its_star() -> None:
    assert SCHEDULE.at(torch.arange(3)).sigma_star.tolist() == [0.75, 0.75, 0.5]


def test_a_second_sigma_just_below_one_is_no_pure_noise() -> None:
    """A strong shift over many steps: only what the walk starts from is noise."""
    step = Schedule(torch.tensor([1.0, 0.9998, 0.5, 0.0]), torch.tensor([1000.0, 999.8, 500.0])).at(torch.arange(2))
    assert torch.equal(step.sigma_star, torch.tensor([0.9998, 0.9998]))


@pytest.mark.parametrize(
    ("first", "is_noise"), [(1.0, True), (0.99999994, True), (0.99967, True), (0.999, False), (0.9, False)]
)
def test_pure_noise_is_within_rounding_of_one(first: float, is_noise: bool) -> None:
    step = Schedule(torch.tensor([first, 0.5, 0.0]), torch.tensor([999.0, 500.0])).at(torch.tensor([0]))
    assert (step.sigma_star == step.sigma_next).item() is is_noise


def test_repeated_rows_are_ordered_as_those_of_a_joined_batch() -> None:
    step = SCHEDULE.at(torch.tensor([0, 2]))
    twice = step.repeat(2)
    for name in ("index", "sigma", "sigma_next", "sigma_star", "time"):
        column = step.__dict__[name]
        assert torch.equal(twice.__dict__[name], torch.cat([column, column]))


@pytest.mark.parametrize(
    ("sigmas", "times", "message"),
    [
        ([1.0, 0.5, 0.0], [1.0, 0.5, 0.0], "3 model times need 4 sigmas, got 3"),
        ([1.0, 0.5], [1.0, 0.5], "2 model times need 3 sigmas, got 2"),
        ([1.0, 0.5, 0.1], [1.0, 0.5], "sigmas must fall strictly to 0"),
        ([0.5, 1.0, 0.0], [1.0, 0.5], "sigmas must fall strictly to 0"),
        ([1.0, 1.0, 0.0], [1.0, 0.5], "sigmas must fall strictly to 0"),
        ([1.0, math.nan, 0.0], [1.0, 0.5], "sigmas must fall strictly to 0"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_walked_is_refused(sigmas: list[float], times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(torch.tensor(sigmas), torch.tensor(times))


def test_a_schedule_is_float32_on_both_sides() -> None:
    """Model times in bfloat16 or int64 would be rounded."""
    sigmas, times = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1000.0, 500.0])
    for wrong in ((sigmas.double(), times), (sigmas, times.long()), (sigmas.bfloat16(), times)):
        with pytest.raises(ValueError, match="a schedule is float32, got sigmas torch"):
            Schedule(*wrong)
