from __future__ import annotations

import pytest

from tests.unit.algorithms.closed_form import outcome
from unirl.algorithms.dppo import DPPO


def test_a_rare_token_may_multiply_its_probability_and_a_common_one_may_not() -> None:
    """r = 3 at 0.01 moves a mass of 0.02, r = 1.5 at 0.5 one of 0.25."""
    found = outcome(DPPO(delta=0.2), [3.0, 1.5, 1.5], [1.0, 1.0, -1.0], old=[0.01, 0.5, 0.5])
    assert found.losses == pytest.approx([-3.0, 0.0, 1.5])
    assert found.gradient == pytest.approx([-3.0, 0.0, 1.5])
    assert found.held == [False, True, False]


def test_below_its_start_a_token_of_positive_advantage_is_pulled_back_up_from_any_distance() -> None:
    found = outcome(DPPO(delta=0.2), [0.2, 0.2], [1.0, -1.0], old=[0.9, 0.9])
    assert found.gradient == pytest.approx([-0.2, 0.0])


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_threshold_that_is_no_difference_of_probabilities_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match=rf"delta is a difference of probabilities in \(0, 1\), got {delta}"):
        DPPO(delta=delta)
