"""Sampling parameters are refused before anything is sampled with them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import AllSteps, FirstFraction, ListedSteps, NoSteps, RandomSteps, WindowSteps

BASE = DiffusionSamplingParams(steps=10, height=64, width=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"height": 0}, "height, width and frames must be positive, got 0 x 64, 1 frames"),
        ({"width": -8}, "height, width and frames must be positive, got 64 x -8, 1 frames"),
        ({"guidance": 0.5}, r"guidance must be at least 1 \(1 = none\), got 0\.5"),
        ({"guidance": math.nan}, "guidance must be at least 1"),
        ({"guidance": math.inf}, "guidance must be at least 1"),
        ({"noise_level": -0.1}, r"noise_level must not be negative, got -0\.1"),
        ({"noise_level": math.nan}, "noise_level must not be negative, got nan"),
        ({"strategy": "cps", "noise_level": 1.5}, r"noise_level of the CPS kernel is in \[0, 1\], got 1\.5"),
        ({"strategy": "cps_unnormalised", "noise_level": 1.5}, "noise_level of the CPS kernel"),
        ({"shift": 0.0}, r"shift must be positive, got 0\.0"),
        ({"shift": math.nan}, "shift must be positive, got nan"),
        ({"sde": ListedSteps((9,))}, "SDE step 9 is the last of 10 steps"),
        ({"sde": ListedSteps((-1,))}, "SDE step -1 is outside"),
        ({"sde": WindowSteps(size=10)}, "a window of 10 steps"),
        ({"sde": RandomSteps(count=10)}, "cannot draw 10 SDE steps"),
        ({"sde": FirstFraction(0.01)}, "is no whole step"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_a_level_above_one_is_fine_for_the_other_kernels() -> None:
    assert dataclasses.replace(BASE, strategy="dance", noise_level=1.5).noise_level == 1.5


@pytest.mark.parametrize(
    ("sde", "expected"),
    [
        (AllSteps(), tuple(range(9))),
        (FirstFraction(1.0), tuple(range(9))),
        (ListedSteps((8,)), (8,)),
        (ListedSteps((3, 1)), (1, 3)),
        (ListedSteps(()), ()),
        (NoSteps(), ()),
        (WindowSteps(size=2), (0, 1)),
    ],
    ids=str,
)
def test_sde_steps_of_a_rollout(sde: Any, expected: tuple[int, ...]) -> None:
    assert dataclasses.replace(BASE, sde=sde).resolve_sde_indices(0) == expected


@pytest.mark.parametrize("strategy", ["flow", "dance", "cps", "cps_unnormalised"])
def test_step_rules_are_the_same_for_every_kernel(strategy: Any) -> None:
    """The last step is deterministic, though Flow would only make it noisy and CPS has std 0 there."""
    sampling = dataclasses.replace(BASE, strategy=strategy)
    assert sampling.resolve_sde_indices(0) == tuple(range(9))
    with pytest.raises(ValueError, match="SDE step 9 is the last of 10 steps"):
        dataclasses.replace(sampling, sde=ListedSteps((8, 9)))


def test_noise_level_zero_is_the_ode_and_has_no_stochastic_step() -> None:
    assert dataclasses.replace(BASE, noise_level=0.0).resolve_sde_indices(3) == ()


def test_one_step_is_deterministic() -> None:
    assert DiffusionSamplingParams(steps=1, height=8, width=8).resolve_sde_indices(0) == ()


def test_a_moving_window_depends_on_the_rollout() -> None:
    sampling = dataclasses.replace(BASE, sde=WindowSteps(size=2))
    assert [sampling.resolve_sde_indices(rollout) for rollout in range(3)] == [(0, 1), (2, 3), (4, 5)]


def test_evaluation_is_the_same_sampling_without_noise() -> None:
    sampling = dataclasses.replace(BASE, guidance=4.0, seed=3, sde=WindowSteps(size=4))
    ode = sampling.deterministic()
    assert ode.resolve_sde_indices(0) == ()
    assert dataclasses.replace(ode, noise_level=sampling.noise_level, sde=sampling.sde) == sampling
    # Siblings that differed by the noise of their steps alone would be one picture.
    assert not dataclasses.replace(sampling, same_initial_noise=True).deterministic().same_initial_noise
    # Fewer steps than the training window spans.
    assert dataclasses.replace(ode, steps=3).steps == 3


def test_equal_settings_are_equal_values() -> None:
    assert dataclasses.replace(BASE) == BASE
    assert dataclasses.replace(BASE, seed=1) != BASE
    assert hash(dataclasses.replace(BASE)) == hash(BASE)
