from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from unirl.train.optim import AdamW


def rates(optimizer: AdamW, total: int) -> list[float]:
    return [optimizer.lr_at(step, total) for step in range(total)]


def test_cosine_over_200_steps_is_at_half_after_100() -> None:
    """A schedule that a resume has stepped twice would be at 0."""
    assert AdamW(lr=1.0, schedule="cosine").lr_at(100, 200) == pytest.approx(0.5, rel=1e-12)


def test_cosine_is_half_a_period_of_the_cosine_above_its_floor() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates(AdamW(lr=1.0, schedule="cosine", final_ratio=0.1), 8) == pytest.approx(expected, rel=1e-12)


def test_linear_falls_by_equal_steps_to_its_floor() -> None:
    assert rates(AdamW(lr=2.0, schedule="linear", final_ratio=0.5), 4) == pytest.approx([2.0, 1.75, 1.5, 1.25])


def test_constant_is_constant() -> None:
    assert rates(AdamW(lr=0.25), 3) == [0.25, 0.25, 0.25]


def test_warmup_rises_by_equal_steps_and_reaches_lr_at_its_last_one() -> None:
    assert rates(AdamW(lr=1.0, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_fall_spans_the_steps_after_the_warmup() -> None:
    assert rates(AdamW(lr=1.0, warmup_steps=2, schedule="linear"), 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_beyond_the_end_the_rate_stays_at_its_floor(schedule: Literal["linear", "cosine"]) -> None:
    optimizer = AdamW(lr=1.0, schedule=schedule, final_ratio=0.1)
    assert [optimizer.lr_at(step, 10) for step in (10, 11, 1000)] == pytest.approx([0.1] * 3)


def test_a_run_that_is_all_warmup_has_no_fall() -> None:
    assert rates(AdamW(lr=1.0, warmup_steps=4, schedule="cosine"), 2) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": math.nan}, "lr must be positive, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \[0.9, 1.0\]"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AdamW(**settings)
