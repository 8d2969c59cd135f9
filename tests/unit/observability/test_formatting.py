"""How figures are written."""

from __future__ import annotations

import math

import pytest

from unirl.observability.formatting import change, duration, figure


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.9, "0.900"),
        (0.90432, "0.904"),
        (-0.4321, "-0.432"),
        (0.04321, "0.0432"),
        (0.001, "0.001"),
        (3e-5, "3e-5"),
        (1.23456, "1.235"),
        (23.414, "23.41"),
        (2500.0, "2,500"),
        (12345.6, "12,346"),
        (1.5e9, "1.5e9"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
    ],
)
def test_figures_are_short_and_keep_what_matters(value: float, text: str) -> None:
    assert figure(value) == text


def test_changes_carry_their_sign() -> None:
    assert change(0.476, 0.904) == "+0.428"
    assert change(0.85, 0.72) == "-0.130"
    assert change(0.5, 0.5) == "0"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (21, "0:21"), (59.6, "1:00"), (725, "12:05"), (10930, "3:02:10")]
)
def test_durations_are_clock_times(seconds: float, text: str) -> None:
    assert duration(seconds) == text
