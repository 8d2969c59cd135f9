"""Advantages of TRL (file 13) and verl / verl-omni (file 15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.conversions import (
    FLOAT32,
    assert_equal_rewards_give_zero,
    blocks,
    names_of,
    with_unbiased_std,
)
from tests.golden.golden import Case, assert_covered, load, tensor
from unirl.types.advantages import Scale, combine_rewards, group_relative

TESTED: dict[str, tuple[str, ...]] = {
    "13_adv_trl": (
        "sum_then_normalize_group",
        "sum_then_normalize_batch",
        "sum_then_normalize_none",
        "sum_then_normalize_group_with_nan",
        "sum_then_normalize_batch_with_nan",
        "sum_then_normalize_none_with_nan",
        "float32_zero_variance_group_n3_reward_0.9",
        "float32_zero_variance_group_n8_reward_0.7",
        "float32_zero_variance_group_n24_reward_23.7",
    ),
    "15_adv_verl": (
        "grpo_norm",
        "grpo_no_norm",
        "grpo_vectorized",
        "rloo_vectorized",
        "gdpo",
        "verl_omni_flow_grpo_global_std_True_norm_False",
        "verl_omni_flow_grpo_global_std_False_norm_True",
        "verl_omni_flow_grpo_global_std_False_norm_False",
    ),
}
WITHOUT_COUNTERPART: dict[str, dict[str, str]] = {
    "13_adv_trl": {},
    "15_adv_verl": {
        "rf++_baseline": "group mean, then whitening over tokens (REINFORCE++ baseline)",
        "opo": "baseline weighted by response length",
        "reinforce_plus_plus": "discounted token returns, whitened over tokens",
        "passk_first_7_rows": "best minus second best of a group, on the best alone",
    },
}


@pytest.mark.parametrize("file", TESTED)
def test_every_case_is_tested_or_listed(file: str) -> None:
    assert_covered(file, TESTED[file], WITHOUT_COUNTERPART[file])


def cases(file: str, *names: str) -> Any:
    assert set(names) <= set(TESTED[file])
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


def zero_variance(file: str) -> Any:
    return cases(file, *(name for name in TESTED[file] if "zero_variance" in name))


# 13 TRL


@cases("13_adv_trl", *(name for name in TESTED["13_adv_trl"] if "zero_variance" not in name))
def test_trl_advantages_of_a_weighted_sum(case: Case) -> None:
    """Unbiased std, eps 1e-4; a completion that no function can score is NaN, and nan-sums skip a missing component."""
    scales: dict[str, Scale] = {"group": "group_std", "batch": "global_std", "none": "none"}
    scale = scales[case.raw("scale_rewards")]
    table = case.input("rewards")
    unscorable = torch.isnan(table).all(1)
    rewards = torch.nansum(table * case.input("reward_weights"), 1).masked_fill(unscorable, torch.nan)
    groups = blocks(len(rewards), case.raw("num_generations"))
    if scale == "none":
        ours = group_relative(rewards, groups, scale=scale).double()
    else:
        ours = with_unbiased_std(rewards, groups, scale, 1e-4)
    torch.testing.assert_close(ours, case.output("advantages"), **FLOAT32)


@cases("13_adv_trl", "sum_then_normalize_group_with_nan", "sum_then_normalize_none_with_nan")
def test_trl_scores_a_row_with_a_missing_component_where_ours_is_invalid(case: Case) -> None:
    """Row 2 lacks its second reward: TRL compares it with fuller rows; here it is invalid and has advantage 0."""
    table, weights = case.input("rewards"), case.raw("reward_weights")
    total = combine_rewards({"first": table[:, 0], "second": table[:, 1]}, {"first": weights[0], "second": weights[1]})
    assert not torch.isfinite(total[2])
    ours = group_relative(total, blocks(12, 4), scale="group_std")
    assert ours[2] == 0
    assert case.output("advantages")[2] > 0.5


@zero_variance("13_adv_trl")
def test_trl_equal_rewards_are_exactly_zero_here(case: Case) -> None:
    assert_equal_rewards_give_zero(case, ["g"] * len(case.raw("rewards")), eps=1e-4)
    assert (tensor(case.float32["advantages"]).abs() > 5e-4).all()


# 15 verl


def first_token(case: Case) -> torch.Tensor:
    """verl repeats a sequence's advantage on each of its tokens; every sequence has a first one."""
    advantages = case.output("advantages")
    return advantages[:, 0] if advantages.ndim == 2 else advantages


SINGLETON = 7  # the only row of group 2
IN_GROUPS = torch.arange(8) != SINGLETON


@cases("15_adv_verl", "grpo_norm", "grpo_no_norm", "grpo_vectorized")
def test_verl_grpo_and_its_singleton_that_keeps_the_raw_score(case: Case) -> None:
    scores, groups = case.input("scores"), names_of(case.raw("index"))
    theirs = first_token(case)
    if case.name == "grpo_no_norm":
        ours = group_relative(scores, groups, scale="none").double()
    else:
        ours = with_unbiased_std(scores, groups, "group_std", 1e-6)
    torch.testing.assert_close(ours[IN_GROUPS], theirs[IN_GROUPS], rtol=1e-6, atol=2e-7)
    assert ours[SINGLETON] == 0
    assert theirs[SINGLETON].item() == pytest.approx(scores[SINGLETON].item(), rel=2e-6)


@cases("15_adv_verl", "rloo_vectorized")
def test_verl_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1(case: Case) -> None:
    groups = names_of(case.raw("index"))
    centred = group_relative(case.input("scores"), groups, scale="none").double()
    n = torch.tensor([groups.count(group) for group in groups], dtype=torch.float64)
    ours = torch.where(n > 1, centred * n / (n - 1).clamp(min=1), 0)
    torch.testing.assert_close(ours, first_token(case), **FLOAT32)


@cases("15_adv_verl", *(name for name in TESTED["15_adv_verl"] if "omni" in name))
def test_verl_omni_flow_grpo(case: Case) -> None:
    """`global_std` without `norm_adv_by_std` divides by nothing; a singleton has advantage 0, as here."""
    scores, groups = case.input("scores"), names_of(case.raw("index"))
    if case.inputs["norm_adv_by_std_in_grpo"]:
        ours = with_unbiased_std(scores, groups, "group_std", 1e-4)
    else:
        ours = group_relative(scores, groups, scale="none").double()
    torch.testing.assert_close(ours, first_token(case), **FLOAT32)


@cases("15_adv_verl", "gdpo")
def test_verl_gdpo_is_per_component_and_then_whitened_over_tokens(case: Case) -> None:
    """Equal once the singleton keeps its raw scores as in verl; a true zero moves the whitened numbers of all."""
    groups, weights = names_of(case.raw("index")), case.raw("weights")
    columns = [tensor(column) for column in case.raw("components").values()]
    normalised = [with_unbiased_std(column, groups, "group_std", 1e-6) for column in columns]
    summed = sum(weight * column for weight, column in zip(weights, normalised, strict=True))
    assert isinstance(summed, torch.Tensor)
    assert summed[SINGLETON] == 0
    mask = case.input("response_mask")
    raw = summed.clone()
    raw[SINGLETON] = sum(weight * column[SINGLETON] for weight, column in zip(weights, columns, strict=True))
    torch.testing.assert_close(whitened(raw, mask), case.output("advantages"), rtol=1e-5, atol=2e-6)
    assert (whitened(summed, mask) - case.output("advantages")).abs().max() > 0.01


def whitened(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """verl's masked_whiten of a value repeated over the tokens of its row."""
    tokens = rows[:, None] * mask
    count = mask.sum()
    centre = tokens.sum() / count
    variance = (((tokens - centre) * mask) ** 2).sum() / (count - 1)
    return (tokens - centre) * (variance + 1e-8).rsqrt() * mask
