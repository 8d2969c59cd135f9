from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.algorithms.closed_form import outcome
from unirl.algorithms.cispo import CISPO


def test_a_token_above_the_bound_keeps_its_gradient_at_the_weight_of_the_bound() -> None:
    """`-sg(min(r, 2)) A log pi`, with pi = 0.1 r."""
    found = outcome(CISPO(cap=2.0), [1.0, 4.0, 4.0], [3.0, 3.0, -3.0])
    assert found.losses == pytest.approx([-3 * math.log(0.1), -6 * math.log(0.4), 6 * math.log(0.4)])
    assert found.gradient == pytest.approx([-3.0, -6.0, 6.0])
    assert found.held == [False, True, True]


def test_bounds_are_of_the_ratio_itself() -> None:
    found = outcome(CISPO(cap=1.0, floor=0.5), [1.1, 0.6, 0.4], [1.0, 1.0, 1.0])
    assert found.gradient == pytest.approx([-1.0, -0.6, -0.5])
    assert found.held == [True, False, True]


@pytest.mark.parametrize("settings", [{"cap": 0.28}, {"floor": -0.1}, {"floor": 1.5}])
def test_a_distance_from_1_in_place_of_a_bound_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bounds of the ratio itself: cap must be at least 1 and floor in \[0, 1\]"):
        CISPO(**settings)
