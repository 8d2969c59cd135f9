"""Sigma schedules of diffusers, UniRL 0.2.0, DanceGRPO / MixGRPO (file 41)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load, tensor
from unirl.sde.schedule import (
    exponential_shift,
    linear_mu,
    pin,
    shift_sigmas,
    stretch_to_terminal,
    twice_shifted_sigmas,
    uniform_sigmas,
)

CASES = load("41_sigma_schedules")
STATIC = [case for name, case in CASES.items() if name.startswith("diffusers_static") and "explicit" not in name]
SINGLE = [case for name, case in CASES.items() if name.startswith("single_shift")]
DYNAMIC = [case for name, case in CASES.items() if name.startswith("dynamic_L")]
TERMINAL = [case for name, case in CASES.items() if name.startswith("dynamic_shift_terminal")]
POLICY = [case for name, case in CASES.items() if name.startswith("unirl_policy")]
ALONE = ("diffusers_static_shift3.0_T10_explicit_sigmas", "dynamic_linear_mu1.15_T10")
WITHOUT_COUNTERPART = {"flux2_empirical_mu": "mu from image tokens and steps: FLUX.2's own, no schedule function"}

# Libraries compute their tables in float32; ours is float64, rounded once.
FLOAT32: dict[str, Any] = {"rtol": 0.0, "atol": 1.3e-7}


def name_of(case: Case) -> str:
    return case.name


def test_every_case_is_tested_or_listed() -> None:
    tested = [case.name for case in (*STATIC, *SINGLE, *DYNAMIC, *TERMINAL, *POLICY)]
    assert_covered("41_sigma_schedules", [*tested, *ALONE], WITHOUT_COUNTERPART)


def assert_table(sigmas: torch.Tensor, expected: torch.Tensor) -> None:
    assert sigmas.dtype == torch.float64
    table = pin(sigmas)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table.double(), expected, **FLOAT32)


@pytest.mark.parametrize("case", STATIC, ids=name_of)
def test_diffusers_shifts_its_own_table_twice(case: Case) -> None:
    steps, shift = case.raw("num_inference_steps"), case.raw("shift")
    ours = twice_shifted_sigmas(steps, shift)
    assert_table(ours, case.output("sigmas"))
    torch.testing.assert_close(1000 * ours, case.output("timesteps"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", STATIC, ids=name_of)
def test_the_single_shift_is_another_table(case: Case) -> None:
    ours = shift_sigmas(uniform_sigmas(case.raw("num_inference_steps")), case.raw("shift"))
    expected = case.output("single_shift_for_comparison")
    torch.testing.assert_close(ours, expected[:-1], rtol=1e-12, atol=0)
    # The grids differ even at shift 1, where only the lower end (1 / 1000 against 1 / T) does.
    assert (ours[1:] - case.output("sigmas")[1:-1]).abs().max() > 0.01


def test_diffusers_shifts_explicit_sigmas_once() -> None:
    case = CASES["diffusers_static_shift3.0_T10_explicit_sigmas"]
    given = uniform_sigmas(10)
    torch.testing.assert_close(given, case.input("sigmas_given"), rtol=0, atol=1e-15)
    assert_table(shift_sigmas(given, case.raw("shift")), case.output("sigmas"))


@pytest.mark.parametrize("case", SINGLE, ids=name_of)
def test_unirl_and_dance_grpo_shift_once(case: Case) -> None:
    ours = shift_sigmas(uniform_sigmas(case.raw("num_steps")), case.raw("shift"))
    assert_table(ours, case.output("unirl"))
    assert_table(ours, case.output("dance_mix_grpo"))


def mu_of(case: Case, tokens: int) -> float:
    base = (case.raw("base_seq_len"), case.raw("base_shift"))
    return linear_mu(tokens, base=base, top=(case.raw("max_seq_len"), case.raw("max_shift")))


@pytest.mark.parametrize("case", DYNAMIC, ids=name_of)
def test_dynamic_shift_by_the_number_of_image_tokens(case: Case) -> None:
    mu = mu_of(case, case.raw("image_seq_len"))
    assert mu == pytest.approx(case.outputs["mu"], rel=1e-12)
    assert mu == pytest.approx(case.outputs["mu_unirl"], rel=1e-12)
    ours = exponential_shift(uniform_sigmas(case.raw("num_steps")), mu)
    assert_table(ours, case.output("sigmas"))
    assert_table(ours, case.output("sigmas_unirl"))
    static = shift_sigmas(uniform_sigmas(case.raw("num_steps")), math.exp(mu))
    torch.testing.assert_close(ours, static, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", TERMINAL, ids=name_of)
def test_dynamic_shift_stretched_to_a_terminal_sigma(case: Case) -> None:
    mu, terminal = mu_of(case, case.raw("image_seq_len")), case.raw("shift_terminal")
    assert mu == pytest.approx(case.outputs["mu"], rel=1e-12)
    ours = stretch_to_terminal(exponential_shift(uniform_sigmas(case.raw("num_steps")), mu), terminal)
    assert_table(ours, case.output("sigmas"))
    assert_table(ours, case.output("sigmas_unirl"))
    assert ours[-1].item() == pytest.approx(terminal, rel=1e-12)


def test_the_linear_shift_by_mu_is_the_static_shift() -> None:
    case = CASES["dynamic_linear_mu1.15_T10"]
    assert_table(shift_sigmas(uniform_sigmas(case.raw("num_steps")), case.raw("mu")), case.output("sigmas"))


@pytest.mark.parametrize("case", POLICY, ids=name_of)
def test_unirl_counts_tokens_after_the_autoencoder_and_patchify(case: Case) -> None:
    """base (256, 0.5), top (4096, 1.15)."""
    side = case.raw("vae_scale_factor") * case.raw("patch_size")
    tokens = (case.raw("height") // side) * (case.raw("width") // side)
    assert tokens == case.outputs["image_seq_len"]
    mu = linear_mu(tokens, base=(256, 0.5), top=(4096, 1.15))
    assert_table(exponential_shift(uniform_sigmas(case.raw("num_steps")), mu), tensor(case.outputs["sigmas"]))
