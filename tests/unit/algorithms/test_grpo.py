from __future__ import annotations

from typing import Any

import pytest

from tests.unit.algorithms.closed_form import outcome
from unirl.algorithms.base import Needs
from unirl.algorithms.grpo import GRPO

RATIOS, ADVANTAGES = [1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]


def test_the_clip_acts_where_a_token_has_moved_with_its_advantage() -> None:
    found = outcome(GRPO(clip_low=0.2, clip_high=0.28), RATIOS, ADVANTAGES)
    assert found.losses == pytest.approx([-2.0, -2.56, 3.0, -1.0, 1.6])
    assert found.held == [False, True, False, False, True]


def test_the_gradient_is_minus_the_advantage_times_the_ratio_and_zero_where_clipped() -> None:
    found = outcome(GRPO(clip_low=0.2, clip_high=0.28), RATIOS, ADVANTAGES)
    assert found.gradient == pytest.approx([-2.0, 0.0, 3.0, -1.0, 0.0])


def test_a_wider_upper_clip_lets_a_rare_token_grow_further() -> None:
    assert outcome(GRPO(clip_high=0.2), [1.25], [1.0]).gradient == [0.0]
    assert outcome(GRPO(clip_high=0.28), [1.25], [1.0]).gradient == pytest.approx([-1.25])


def test_it_asks_for_a_reference_only_where_the_kl_counts() -> None:
    assert GRPO().needs == Needs(reference=False)
    assert GRPO(kl_coef=0.04).needs == Needs(reference=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_low": 0.0}, r"clip_low must be in \(0, 1\) and clip_high positive, got 0.0 and"),
        ({"clip_low": 1.0}, r"clip_low must be in \(0, 1\)"),
        ({"clip_high": 0.0}, "clip_high positive, got 0.2 and 0.0"),
        ({"kl_coef": -0.1}, "kl_coef must not be negative, got -0.1"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GRPO(**settings)
