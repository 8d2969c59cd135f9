"""Advantages of Flow-GRPO / DiffusionNFT, DanceGRPO / MixGRPO, UniRL 0.2.0, Flow-Factory (files 10, 11, 12, 14)."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from tests.golden.conversions import (
    FLOAT32,
    assert_equal_rewards_give_zero,
    blocks,
    names_of,
    part_of,
    per_component,
    with_unbiased_std,
)
from tests.golden.golden import Case, assert_covered, load, tensor
from unirl.types.advantages import Scale, combine_rewards, group_relative
from unirl.types.reward import Scores

TESTED: dict[str, tuple[str, ...]] = {
    "10_adv_flow_grpo": (
        "grpo_global_std_True",
        "grpo_global_std_True_permuted",
        "grpo_global_std_False",
        "grpo_rewards_repeated_over_3_timesteps",
        "zero_variance_group_n3_reward_0.9",
        "zero_variance_group_n24_reward_23.7",
        "no_per_prompt_tracking",
        "zero_advantage_mask",
    ),
    "11_adv_dance_mix": (
        "dance_use_group_True",
        "dance_use_group_False",
        "mix_reward_aggr_trim0.0",
        "mix_advantage_aggr_trim0.0",
        "float32_zero_variance_group_n3_reward_0.9",
        "float32_zero_variance_group_n8_reward_0.7",
        "float32_zero_variance_group_n12_reward_0.7",
        "float32_zero_variance_group_n24_reward_0.9",
    ),
    "12_adv_unirl": (
        "group_std",
        "group_no_normalise",
        "group_mean_global_std",
        "global_no_normalise",
        "eps_0.01",
        "non_finite_group_std",
        "non_finite_group_mean_global_std",
        "non_finite_global",
        "group_layer_None",
        "group_layer_1",
        "float32_zero_variance_group_n3_reward_0.9",
        "float32_zero_variance_group_n6_reward_0.3",
        "float32_zero_variance_group_n12_reward_0.7",
        "float32_zero_variance_group_n24_reward_0.9",
        "float32_zero_variance_group_n24_reward_23.7",
    ),
    "14_adv_flow_factory": (
        "sum_global_std_True_distributed_k_repeat",
        "sum_global_std_False_distributed_k_repeat",
        "sum_global_std_True_group_contiguous",
        "sum_global_std_False_group_contiguous",
        "gdpo_global_std_True_distributed_k_repeat",
        "gdpo_global_std_True_group_contiguous",
        "id_collision_above_2_24",
    ),
}
GAE = ("gae_gamma0.9_lambda0.8", "gae_gamma1.0_lambda1.0", "gae_2d_masked_hole")  # of file 12: test_gae.py
WITHOUT_COUNTERPART: dict[str, dict[str, str]] = {
    "10_adv_flow_grpo": {
        "two_updates_without_clear": "statistics over the history of a prompt: a rollout's statistics are its own here",
        "type_rwr": "raw rewards as advantages (reward-weighted regression)",
        "type_dpo": "best and worst of a group as +1 and -1, ties included",
        "type_gardo": "rewards reshaped by distances between features",
    },
    "11_adv_dance_mix": {
        "mix_advantage_aggr_trim0.3": "the lowest rewards of a group leave its statistics: no such option",
        "trim_to_one": "trimming (here to one element, which gives nan in the authors' code)",
    },
    "12_adv_unirl": dict.fromkeys(GAE, "tested in test_gae.py"),
    "14_adv_flow_factory": {},
}


@pytest.mark.parametrize("file", TESTED)
def test_every_case_is_tested_or_listed(file: str) -> None:
    assert_covered(file, TESTED[file], WITHOUT_COUNTERPART[file])


def cases(file: str, *names: str) -> Any:
    assert set(names) <= set(TESTED[file])
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


def zero_variance(file: str) -> Any:
    return cases(file, *(name for name in TESTED[file] if "zero_variance" in name))


# 10 Flow-GRPO, DiffusionNFT


@cases("10_adv_flow_grpo", "grpo_global_std_True", "grpo_global_std_False")
def test_flow_grpo(case: Case) -> None:
    scale: Scale = "global_std" if case.inputs["global_std"] else "group_std"
    ours = group_relative(case.input("rewards"), names_of(case.raw("groups")), scale=scale, eps=1e-4)
    torch.testing.assert_close(ours.double(), case.output("advantages"), **FLOAT32)
    torch.testing.assert_close(ours.double(), case.output("advantages_DiffusionNFT"), **FLOAT32)


@cases("10_adv_flow_grpo", "grpo_global_std_True_permuted")
def test_flow_grpo_with_rows_in_another_order(case: Case) -> None:
    order = case.raw("order")
    groups = [names_of(case.raw("groups"))[row] for row in order]
    ours = group_relative(case.input("rewards")[order], groups, scale="global_std", eps=1e-4)
    torch.testing.assert_close(ours.double(), case.output("advantages_in_permuted_order"), **FLOAT32)


@cases("10_adv_flow_grpo", "grpo_rewards_repeated_over_3_timesteps")
def test_flow_grpo_repeats_the_reward_along_time_where_ours_is_one_number(case: Case) -> None:
    ours = group_relative(case.input("rewards"), names_of(case.raw("groups")), scale="global_std", eps=1e-4)
    torch.testing.assert_close(ours.double(), case.output("advantages_first_column"), **FLOAT32)
    assert case.outputs["columns_equal"]


@cases("10_adv_flow_grpo", "no_per_prompt_tracking")
def test_flow_grpo_without_groups(case: Case) -> None:
    rewards = case.input("rewards")
    ours = group_relative(rewards, [""] * len(rewards), scale="group_std", eps=1e-4)
    torch.testing.assert_close(ours.double(), case.output("advantages"), **FLOAT32)


@cases("10_adv_flow_grpo", "zero_advantage_mask")
def test_flow_grpo_filter_of_zero_advantages_keeps_the_same_rows(case: Case) -> None:
    ours = group_relative(case.input("rewards"), names_of(case.raw("groups")), scale="global_std", eps=1e-4)
    torch.testing.assert_close(ours.double(), case.input("advantages"), **FLOAT32)
    assert (ours != 0).long().tolist() == case.outputs["kept"]


@pytest.mark.parametrize("column", ["rewards_float32_widened", "rewards_float64"])
@zero_variance("10_adv_flow_grpo")
def test_flow_grpo_equal_rewards_are_exactly_zero(case: Case, column: str) -> None:
    rewards = case.input(column)
    assert (
        group_relative(rewards, ["g"] * len(rewards), scale="group_std", eps=1e-4).tolist()
        == case.outputs["advantages_right"]
    )


# 11 DanceGRPO, MixGRPO


@cases("11_adv_dance_mix", "dance_use_group_True", "dance_use_group_False", "mix_reward_aggr_trim0.0")
def test_dance_and_mix_grpo_divide_by_the_unbiased_std(case: Case) -> None:
    """Their advantages are smaller than ours by sqrt((n - 1) / n): 13.4 % at n = 4."""
    rewards = case.input("rewards")
    size = case.raw("num_generations") if case.inputs.get("use_group", True) else len(rewards)
    groups = blocks(len(rewards), size)
    theirs = case.output("advantages")
    torch.testing.assert_close(with_unbiased_std(rewards, groups, "group_std", 1e-8), theirs, **FLOAT32)
    ours = group_relative(rewards, groups, scale="group_std", eps=1e-8).double()
    moved = ours != 0
    shrunk = torch.full((int(moved.sum()),), math.sqrt((size - 1) / size), dtype=torch.float64)
    torch.testing.assert_close(theirs[moved] / ours[moved], shrunk, rtol=1e-6, atol=0)


@cases("11_adv_dance_mix", "mix_advantage_aggr_trim0.0")
def test_mix_grpo_advantages_per_reward_are_normalised_then_summed(case: Case) -> None:
    columns = {"hps": case.input("rewards"), "clip": case.input("second_reward")}
    weights = case.raw("weights")
    ours = per_component(columns, weights, size=4, eps=1e-8 * math.sqrt(3 / 4))
    torch.testing.assert_close(ours * math.sqrt(3 / 4), case.output("advantages"), **FLOAT32)


@zero_variance("11_adv_dance_mix")
def test_dance_and_mix_grpo_equal_rewards_are_exactly_zero_here(case: Case) -> None:
    """In the authors' float32 the mean is off by an ulp, and eps = 1e-8 is below it: 0.7 .. 0.9 for all."""
    assert_equal_rewards_give_zero(case, ["g"] * len(case.raw("rewards")), eps=1e-8)
    for authors in ("advantages_DanceGRPO", "advantages_MixGRPO"):
        assert (tensor(case.float32[authors]).abs() > 0.4).all()


# 12 UniRL 0.2.0


@cases("12_adv_unirl", *(name for name in TESTED["12_adv_unirl"] if "zero_variance" not in name))
def test_unirl_advantages_of_a_part(case: Case) -> None:
    ids, rewards = case.raw("sample_ids"), case.input("rewards")
    scope: Literal["group", "prompt", "global"] = case.inputs.get("scope", "group")
    scale: Scale = "global_std" if case.inputs.get("use_global_std") else "group_std"
    if case.inputs.get("normalize") is False:
        scale = "none"
    part = part_of(ids).with_rewards(Scores(rewards, {}, [()] * len(ids)))
    part = part.compute_advantages(scope, scale, eps=case.inputs.get("eps", 1e-8))
    assert part.advantages is not None
    torch.testing.assert_close(part.advantages.double(), case.output("advantages"), **FLOAT32)
    assert (part.advantages[~torch.isfinite(rewards)] == 0).all()


@zero_variance("12_adv_unirl")
def test_unirl_equal_rewards_are_exactly_zero_here(case: Case) -> None:
    groups = part_of(case.raw("sample_ids")).groups("group")
    assert_equal_rewards_give_zero(case, groups, eps=1e-8)
    assert (tensor(case.float32["advantages"]).abs() > 0.4).all()


# 14 Flow-Factory


@cases("14_adv_flow_factory", *(name for name in TESTED["14_adv_flow_factory"] if name.startswith("sum")))
def test_flow_factory_weighted_sum(case: Case) -> None:
    """Its std has a floor of 1e-6 instead of an eps; its arithmetic is float32."""
    components = {"a": case.input("reward_a"), "b": case.input("reward_b")}
    rewards = combine_rewards(components, case.raw("weights"))
    scale: Scale = "global_std" if case.inputs["global_std"] else "group_std"
    ours = group_relative(rewards, names_of(case.raw("groups")), scale=scale, eps=0.0)
    torch.testing.assert_close(ours.double(), case.output("advantages"), rtol=1e-6, atol=2e-7)


@cases("14_adv_flow_factory", *(name for name in TESTED["14_adv_flow_factory"] if name.startswith("gdpo")))
def test_flow_factory_gdpo_is_per_component_and_then_global(case: Case) -> None:
    components = {"a": case.input("reward_a"), "b": case.input("reward_b")}
    summed = per_component(components, case.raw("weights"), size=4, eps=0.0)
    ours = group_relative(summed, [""] * len(summed), scale="group_std", eps=0.0)
    torch.testing.assert_close(ours.double(), case.output("advantages"), rtol=1e-6, atol=3e-7)


@cases("14_adv_flow_factory", "id_collision_above_2_24")
def test_flow_factory_merges_groups_whose_ids_collide_in_float32(case: Case) -> None:
    assert "got 8 for group 0" in case.outputs["result"]
    ids = [f"r0.p{unique}/{row}" for row, unique in enumerate(case.raw("unique_ids"))]
    groups = part_of(ids).groups("group")
    assert len(set(groups)) == 2
    ours = group_relative(case.input("rewards"), groups, scale="none")
    expected = case.input("rewards").reshape(2, 4)
    torch.testing.assert_close(ours.double(), (expected - expected.mean(1, keepdim=True)).flatten(), **FLOAT32)
