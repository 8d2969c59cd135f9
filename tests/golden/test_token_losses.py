"""Losses of tokens, against UniRL 0.2.0 (file 31) and slime (file 35)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from tests.golden.tokens import EXACT, Tokens, gradient
from unirl.algorithms.losses import bounded_exp, bounded_ratio, clipped_away, clipped_surrogate
from unirl.algorithms.token_losses import (
    Aggregation,
    dppo,
    drpo,
    dual_clip,
    kl_estimate,
    value_loss,
)

UNIRL, SLIME = "31_ar_unirl", "35_ar_slime"
GRPO = [name for name in load(UNIRL) if name.startswith("grpo")]
GSPO = [name for name in load(UNIRL) if name.startswith("gspo") and "clamped" not in name]
DRPO = [name for name in load(UNIRL) if name.startswith("drpo") and "clamped" not in name]
DPPO = [name for name in load(UNIRL) if name.startswith("dppo")]
PPO = [name for name in load(UNIRL) if name.startswith("ppo")]
SINGLE = ("drpo_clamped_log_ratio", "gspo_clamped_log_ratio", "rollout_replay_k3_metric")
CLIPPED = [name for name in load(SLIME) if name.startswith("policy_loss")]
KL = [name for name in load(SLIME) if name.startswith("approx_kl")]
CPPO = "a budget of divergence along the prefix of a sequence: not among the algorithms"


def test_every_case_is_tested_or_listed() -> None:
    listed = {name: CPPO for name in load(UNIRL) if name.startswith("cppo")}
    assert_covered(UNIRL, [*GRPO, *GSPO, *DRPO, *DPPO, *PPO, *SINGLE], listed)
    assert_covered(SLIME, [*CLIPPED, *KL, "gspo_sequence_kl_hole"], {})


def cases(file: str, *names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


def assert_unirl(case: Case, given: Tokens, losses: torch.Tensor, aggregation: Aggregation | None = None) -> None:
    """UniRL averages over all sequences; ours, like verl's, over those that train a token."""
    aggregation = aggregation or case.inputs.get("loss_agg_mode", "token-mean")
    assert aggregation is not None
    horizon = case.raw("horizon") if aggregation == "seq-mean-token-sum-norm" else None
    loss = given.mean(losses, aggregation, horizon)
    if case.name.endswith("fully_masked_sequence") and aggregation != "token-mean":
        loss = loss * 3 / 4
    torch.testing.assert_close(loss, case.output("policy_loss" if "policy_loss" in case.outputs else "loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, given.new), given.packed(case.output("grad")), **EXACT)


# UniRL


@cases(UNIRL, *GRPO)
def test_unirl_grpo(case: Case) -> None:
    given = Tokens.of(case)
    # A schedule of the clip range is a number that the caller passes.
    low = case.outputs["clip_range"] if "clip_schedule" in case.inputs else case.raw("clip_range")
    high = case.inputs.get("clip_range_high", low)
    assert_unirl(case, given, clipped_surrogate(given.ratio, given.advantages, low, high))


@cases(UNIRL, *GSPO)
def test_unirl_gspo_is_the_clip_loss_of_the_sequence_ratio(case: Case) -> None:
    given = Tokens.of(case)
    low = case.inputs.get("clip_range", 3e-4)
    high = case.inputs.get("clip_range_high", low)
    losses = clipped_surrogate(given.sequence_ratio, given.advantages, low, high)
    assert_unirl(case, given, losses, "seq-mean-token-mean")


@cases(UNIRL, *DRPO)
def test_unirl_drpo(case: Case) -> None:
    given = Tokens.of(case)
    losses = drpo(given.new, given.old, given.advantages, case.raw("drpo_epsilon"))
    if not case.raw("penalty_mu_weighted"):
        surrogate = -given.advantages * given.ratio
        losses = surrogate + (losses - surrogate) / given.old.exp()
    assert_unirl(case, given, losses)


@cases(UNIRL, *DPPO)
def test_unirl_dppo(case: Case) -> None:
    given = Tokens.of(case)
    losses, dropped = dppo(given.new, given.old, given.advantages, case.raw("dppo_delta"))
    assert_unirl(case, given, losses)
    assert not given.packed(case.output("grad"))[dropped].any()
    assert dropped.any()


@cases(UNIRL, *PPO)
def test_unirl_ppo_policy_and_value_loss(case: Case) -> None:
    given = Tokens.of(case)
    advantages, returns = (given.packed(case.input(name)) for name in ("token_advantages", "returns"))
    old_values, values = (given.packed(case.input(name)) for name in ("values_old", "values_new"))
    values.requires_grad_()
    clip, aggregation = case.raw("clip_range"), case.raw("loss_agg_mode")
    assert_unirl(case, given, clipped_surrogate(given.ratio, advantages, clip, clip))
    horizon = case.raw("horizon") if aggregation == "seq-mean-token-sum-norm" else None
    losses = value_loss(values, old_values, returns, case.raw("cliprange_value"))
    loss = given.mean(losses, aggregation, horizon)
    torch.testing.assert_close(loss, case.output("value_loss"), **EXACT)
    scaled = case.raw("vf_coef") * loss
    torch.testing.assert_close(case.output("policy_loss") + scaled, case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(scaled, values), given.packed(case.output("grad_values")), **EXACT)


@cases(UNIRL, "drpo_clamped_log_ratio")
def test_unirl_drpo_bounds_the_log_ratio_at_20_as_ours_does(case: Case) -> None:
    old = torch.full((3,), case.raw("old_logp"), dtype=torch.float64)
    new = (old + case.input("new_minus_old")).requires_grad_()
    losses = drpo(new, old, case.input("advantages"), case.raw("epsilon"))
    torch.testing.assert_close(losses, case.output("loss_per_token"), **EXACT)
    torch.testing.assert_close(gradient(losses.sum(), new), case.output("grad"), **EXACT)


@cases(UNIRL, "gspo_clamped_log_ratio")
def test_unirl_gspo_bounds_the_log_ratio_at_10_from_above_alone(case: Case) -> None:
    """At 12 ours is e^12 with that gradient, at -30 the lower clip holds, at 2 both agree."""
    log_ratio = case.input("sequence_log_ratio").requires_grad_()
    losses = clipped_surrogate(bounded_exp(log_ratio), case.input("advantages"), 3e-4, 3e-4)
    torch.testing.assert_close(losses[1:], case.output("loss_per_sequence")[1:], **EXACT)
    assert case.outputs["loss_per_sequence"][0] == pytest.approx(torch.tensor(10.0).double().exp().item())
    pulled = gradient(losses.sum(), log_ratio)
    torch.testing.assert_close(pulled[1:], case.output("grad")[1:], **EXACT)
    torch.testing.assert_close(pulled[0], log_ratio[0].exp(), **EXACT)
    assert case.outputs["grad"][0] == 0.0


@cases(UNIRL, "rollout_replay_k3_metric")
def test_unirl_distance_of_rollout_and_replay_is_k3_of_the_rollout(case: Case) -> None:
    given = Tokens.of(case)
    distance = kl_estimate(given.rollout, given.new.detach(), "k3")
    found = [distance.mean(), distance.max(), distance.quantile(0.9), distance.quantile(0.99)]
    expected = [case.output(name) for name in ("k3_mean", "k3_max", "k3_p90", "k3_p99")]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), **EXACT)


# slime


@cases(SLIME, *CLIPPED)
def test_slime_clip_loss_with_and_without_dual_clip(case: Case) -> None:
    given = Tokens.of(case)
    low, high, cap = case.raw("eps_clip"), case.raw("eps_clip_high"), case.raw("eps_clip_c")
    losses = clipped_surrogate(given.ratio, given.advantages, low, high)
    if cap is not None:
        losses = dual_clip(losses, given.advantages, cap)
    torch.testing.assert_close(losses, case.output("loss_per_token"), **EXACT)
    torch.testing.assert_close(gradient(losses.sum(), given.new), case.output("grad_of_sum"), **EXACT)
    away = clipped_away(given.ratio, given.advantages, low, high)
    assert away.double().tolist() == case.outputs["clipfrac"]


@cases(SLIME, *KL)
def test_slime_kl_estimates(case: Case) -> None:
    """`low_var_kl` is k3; its importance weight is the detached ratio."""
    given = Tokens.of(case)
    kind = case.raw("kl_loss_type")
    kl = kl_estimate(given.new, given.reference, "k3" if kind == "low_var_kl" else kind)
    if case.raw("importance_ratio") is not None:
        kl = bounded_ratio(given.new.detach(), given.old) * kl
    torch.testing.assert_close(kl, case.output("kl"), **EXACT)
    torch.testing.assert_close(gradient(kl.sum(), given.new), case.output("grad_of_sum"), **EXACT)


@cases(SLIME, "gspo_sequence_kl_hole")
def test_slime_sequence_kl_is_minus_the_log_of_the_sequence_ratio(case: Case) -> None:
    given = Tokens.of(case)
    torch.testing.assert_close(-given.sequence_ratio.log().detach(), case.output("ppo_kl_packed"), **EXACT)
