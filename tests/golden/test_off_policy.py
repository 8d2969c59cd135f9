"""Weights of rollouts from another engine, against verl, TRL and slime (file 33)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from tests.golden.tokens import EXACT, Tokens
from unirl.algorithms.token_losses import Level, importance_weights

FILE = "33_ar_off_policy"
BATCH = "divided by the mean weight of the batch: would depend on the micro-batch"
STATISTIC = "rejects a sequence by a mean or maximum of its tokens"
WITHOUT_COUNTERPART = {
    **{name: BATCH for name in load(FILE) if name.endswith("batchnorm")},
    "verl_rs_seq_mean_k1_0.9_1.1": STATISTIC,
    "verl_rs_seq_mean_k3_0.05": STATISTIC,
    "verl_rs_seq_max_k2_0.3": STATISTIC,
    "verl_rs_token_k1,seq_mean_k3_0.5_2.0,0.05": STATISTIC,
    "slime_opsm_0.05": "sequence mask of DeepSeek-V3.2",
}
VERL = [name for name in load(FILE) if name.startswith("verl_is") and name not in WITHOUT_COUNTERPART]
TRL = [name for name in load(FILE) if name.startswith("trl")]
SLIME = ("slime_tis_0.0_1.5", "slime_icepop_0.5_1.5")
BOUNDS = ("verl_rs_token_k1_0.8_1.25", "verl_rs_token_k1_0.25_1.2", "verl_rs_seq_sum_k1_0.5_2.0")


def test_every_case_is_tested_or_listed() -> None:
    assert_covered(FILE, [*VERL, *TRL, *SLIME, *BOUNDS, "verl_rs_token_k2_0.1"], WITHOUT_COUNTERPART)


def cases(*names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(FILE)[name], id=name) for name in names])


def ours(given: Tokens, level: Level, cap: float, floor: float | None = None) -> torch.Tensor:
    return importance_weights(given.old, given.rollout, given.mask, given.lengths, level=level, cap=cap, floor=floor)


def bounds(threshold: str) -> tuple[float, float]:
    low, high = threshold.split("_")
    return float(low), float(high)


@cases(*VERL)
def test_verl_truncates_at_one_threshold_and_masks_between_two(case: Case) -> None:
    given, threshold = Tokens.of(case), case.raw("threshold")
    floor, cap = bounds(threshold) if isinstance(threshold, str) else (None, threshold)
    weights = ours(given, case.raw("rollout_is"), cap, floor)
    torch.testing.assert_close(weights, given.packed(case.output("weights")), **EXACT)


@cases(*TRL)
def test_trl_truncates_or_masks_by_name(case: Case) -> None:
    given, (level, action) = Tokens.of(case), case.raw("mode").split("_")
    floor = (case.raw("clip_min") or 0.0) if action == "mask" else None
    weights = ours(given, level, case.raw("clip_max"), floor)
    expected = case.output("weights").expand(4, 6)
    torch.testing.assert_close(weights, given.packed(expected), **EXACT)


@cases(*SLIME)
def test_slime_truncation_and_icepop(case: Case) -> None:
    floor = case.raw("tis_clip_low") if "icepop" in case.name else None
    weights = ours(Tokens.of(case), "token", case.raw("tis_clip"), floor)
    torch.testing.assert_close(weights, case.output("weights_packed"), **EXACT)


@cases(*BOUNDS)
def test_verl_rejection_bounds_the_inverse_of_the_ratio_that_ours_bounds(case: Case) -> None:
    given = Tokens.of(case)
    level: Level = "token" if "token" in case.raw("rollout_rs") else "sequence"
    low, high = bounds(case.raw("threshold"))
    kept = given.trained((ours(given, level, high, low) > 0).double())
    right = given.packed(case.output("mask_if_bounds_were_on_train_over_rollout"))
    assert kept.tolist() == given.trained(right).tolist()
    inverse = given.trained((ours(given, level, 1 / low, 1 / high) > 0).double())
    authors = given.trained(given.packed(case.output("mask")))
    assert inverse.tolist() == authors.tolist()
    assert (kept.tolist() == authors.tolist()) == (case.name != "verl_rs_token_k1_0.25_1.2")


@cases("verl_rs_token_k2_0.1")
def test_verl_bound_of_half_the_squared_log_ratio_is_a_band_of_the_ratio(case: Case) -> None:
    given, edge = Tokens.of(case), math.sqrt(2 * 0.1)
    kept = (ours(given, "token", math.exp(edge), math.exp(-edge)) > 0).double()
    assert kept.tolist() == given.trained(given.packed(case.output("mask"))).tolist()
