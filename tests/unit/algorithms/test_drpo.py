from __future__ import annotations

import pytest

from tests.unit.algorithms.closed_form import outcome
from unirl.algorithms.drpo import DRPO


def test_loss_and_gradient_are_the_closed_form() -> None:
    """`-A r + |A| p (r - 1)^2 / (2 e)` and by log pi `r (-A + |A| p (r - 1) / e)`, at p = 0.5 and e = 0.25."""
    found = outcome(DRPO(epsilon=0.25), [1.25, 0.75, 1.25], [2.0, -2.0, -2.0], old=[0.5] * 3)
    assert found.losses == pytest.approx([-2.5 + 0.125, 1.5 + 0.125, 2.5 + 0.125])
    assert found.gradient == pytest.approx([1.25 * (-2 + 1), 0.75 * (2 - 1), 1.25 * (2 + 1)])


def test_the_push_ends_where_the_probability_has_moved_by_epsilon_and_turns_back_beyond() -> None:
    found = outcome(DRPO(epsilon=0.25), [1.5, 1.6, 0.5, 0.4], [1.0, 1.0, -1.0, -1.0], old=[0.5] * 4)
    assert found.gradient[0] == pytest.approx(0.0)
    assert found.gradient[2] == pytest.approx(0.0)
    assert found.gradient[1] > 0 > found.gradient[3]
    assert found.held[1]
    assert found.held[3]


def test_an_epsilon_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epsilon must be positive, got 0\.0"):
        DRPO(epsilon=0.0)
