"""Sigma schedules by hand; other people's tables are in tests/golden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.sde.schedule import (
    exponential_shift,
    flux2_mu,
    linear_mu,
    pin,
    shift_sigmas,
    stretch_to_terminal,
    twice_shifted_sigmas,
    uniform_sigmas,
)

QUARTERS = torch.tensor([1, 0.75, 0.5, 0.25], dtype=torch.float64)


def test_the_base_grid_falls_from_one_to_one_over_the_steps() -> None:
    assert uniform_sigmas(4).tolist() == QUARTERS.tolist()
    assert uniform_sigmas(1).tolist() == [1.0]
    assert uniform_sigmas(4).dtype == torch.float64


def test_a_shift_is_applied_once() -> None:
    """Shifted again, the table would be [1, 0.9642857, 0.9, 0.75]."""
    once = shift_sigmas(uniform_sigmas(4), 3.0)
    assert once.tolist() == pytest.approx([1, 0.9, 0.75, 0.5])
    assert shift_sigmas(uniform_sigmas(4), 3.0).tolist() == once.tolist()
    assert shift_sigmas(once, 3.0).tolist() == pytest.approx([1, 0.9642857, 0.9, 0.75])
    assert pin(once).tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0])


def test_the_lowest_sigma_of_a_thousand_training_steps() -> None:
    """0.0029940; where the ends are stored shifted and shifted again, 0.0089286."""
    assert shift_sigmas(torch.tensor([1e-3], dtype=torch.float64), 3.0).item() == pytest.approx(0.0029940, abs=1e-7)
    assert twice_shifted_sigmas(10, 3.0)[-1].item() == pytest.approx(0.0089286, abs=1e-7)


@given(shift=st.floats(0.1, 20), steps=st.integers(2, 60))
def test_shifts_by_mu_and_by_its_exponential_are_one(shift: float, steps: int) -> None:
    static, dynamic = (
        shift_sigmas(uniform_sigmas(steps), shift),
        exponential_shift(uniform_sigmas(steps), math.log(shift)),
    )
    torch.testing.assert_close(static, dynamic, rtol=1e-12, atol=0)
    assert pin(static)[0] == 1
    assert (static[1:] < static[:-1]).all()


@given(first=st.floats(0.2, 5), second=st.floats(0.2, 5))
def test_two_shifts_are_the_shift_by_their_product(first: float, second: float) -> None:
    twice = shift_sigmas(shift_sigmas(QUARTERS, first), second)
    torch.testing.assert_close(twice, shift_sigmas(QUARTERS, first * second), rtol=1e-12, atol=0)


def test_mu_lies_on_the_line_through_two_points() -> None:
    line = {"base": (256, 0.5), "top": (4096, 1.15)}
    assert linear_mu(256, **line) == 0.5
    assert linear_mu(4096, **line) == pytest.approx(1.15)
    assert linear_mu(2176, **line) == pytest.approx(0.825)


def test_mu_of_flux2_falls_with_steps_up_to_4300_tokens() -> None:
    """1024 pixels are 4096 tokens: 8.73809524e-05 * 4096 + 1.89833333 = 2.2562457 at 10 steps, 1.1499966 at 200."""
    assert flux2_mu(4096, 10) == pytest.approx(2.2562457, abs=1e-6)
    assert flux2_mu(4096, 200) == pytest.approx(1.1499966, abs=1e-6)
    assert flux2_mu(4096, 105) == pytest.approx((2.2562457 + 1.1499966) / 2, abs=1e-6)
    assert flux2_mu(4301, 10) == flux2_mu(4301, 200) == pytest.approx(0.00016927 * 4301 + 0.45666666)


def test_stretching_puts_the_last_sigma_at_the_terminal() -> None:
    stretched = stretch_to_terminal(QUARTERS, 0.1)
    assert stretched.tolist() == pytest.approx([1, 0.7, 0.4, 0.1])


def test_one_step_cannot_be_stretched() -> None:
    with pytest.raises(ValueError, match="stretched to a terminal sigma needs at least 2 steps, got 1"):
        stretch_to_terminal(uniform_sigmas(1), 0.1)


def test_pinning_appends_zero_and_rounds_once() -> None:
    table = pin(shift_sigmas(uniform_sigmas(7), 3.0))
    assert table.dtype == torch.float32
    assert len(table) == 8
    assert table[-1] == 0
    assert torch.equal(table[:-1], shift_sigmas(uniform_sigmas(7), 3.0).float())


def test_the_number_of_intervals_is_the_number_of_steps() -> None:
    """Point 3 of 14 intervals (15 points) is 0.7857143, of 13 it is 0.7692308."""
    assert pin(uniform_sigmas(14))[3].item() == pytest.approx(0.7857143, abs=1e-7)
    assert pin(uniform_sigmas(13))[3].item() == pytest.approx(0.7692308, abs=1e-7)


@pytest.mark.parametrize("sigmas", [[1.0, 1.0], [0.5, 0.6], [1.0, 0.0], [1.5, 1.0], [1.0, math.nan]], ids=str)
def test_a_table_that_does_not_fall_from_at_most_one_is_refused(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="sigmas must fall strictly from at most 1 to 0"):
        pin(torch.tensor(sigmas, dtype=torch.float64))


def test_two_sigmas_that_float32_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="sigmas must fall strictly"):
        pin(torch.tensor([1.0, 1 - 1e-9], dtype=torch.float64))
