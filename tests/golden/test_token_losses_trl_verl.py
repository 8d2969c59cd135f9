"""Losses of tokens, against TRL (file 30) and verl (file 32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load, tensor
from tests.golden.tokens import EXACT, Tokens, gradient
from unirl.algorithms.losses import bounded_ratio, clipped_away, clipped_surrogate
from unirl.algorithms.token_losses import (
    Aggregation,
    cispo,
    dppo,
    dual_clip,
    importance_weights,
    kl_estimate,
    terms,
    token_weights,
    weighted_sum,
)

TRL, VERL = "30_ar_trl", "32_ar_verl"
# verl divides the mean of a sequence by its tokens + 1e-8.
VERL_SEQUENCE_MEAN: dict[str, Any] = {"rtol": 1.1e-8, "atol": 1.1e-8}
AGGREGATIONS: dict[str, tuple[Aggregation, int | None]] = {
    "grpo": ("seq-mean-token-mean", None),
    "bnpo": ("token-mean", None),
    "dapo": ("token-mean", None),
    "cispo": ("token-mean", None),
    "dr_grpo": ("seq-mean-token-sum-norm", 6),
    "luspo": ("seq-mean-token-sum-norm", 1),  # the sum over the tokens of a sequence
}
NO_TRL = {"sapo": "soft gate of the ratio (SAPO)", "vespo": "gamma weight of the sequence (VESPO)"}
NO_VERL = {
    "sapo": "soft gate of the ratio (SAPO)",
    "geo_mean_clip0.2": "geometric mean of clipped ratios (GMPO)",
    "geo_mean_clip0.2_hole": "geometric mean of clipped ratios (GMPO)",
    "geo_mean_clip0.4_hole": "geometric mean of clipped ratios (GMPO)",
    "dppo_kl_delta0.05": "DPPO with the binary KL in place of the binary TV",
    "dro_beta0.1": "direct reward optimisation, a squared log-ratio (DRO)",
    "kl_abs": "the absolute log-ratio, no estimate of a KL",
}
TRL_LISTED = {
    **{name: reason for start, reason in NO_TRL.items() for name in load(TRL) if name.startswith(start)},
    **{name: "sequence mask of DeepSeek-V3.2" for name in load(TRL) if "off_policy_mask" in name},
}
MICRO_BATCHES = [name for name in load(TRL) if name.startswith("micro_batches")]
TRL_LOSSES = [name for name in load(TRL) if name not in TRL_LISTED and name not in MICRO_BATCHES]
PPO = [name for name in load(VERL) if name.startswith("ppo")]
GSPO = ("gspo_3e-4_4e-4", "gspo_0.2_hole")
CISPO = ("cispo_0.2", "cispo_low0.2_high0.28")
DPPO = ("dppo_tv_delta0.15", "dppo_tv_delta0.05")
KL = ("kl_k2", "kl_k3", "kl_k3+", "kl_k1+")


def test_every_case_is_tested_or_listed() -> None:
    assert_covered(TRL, [*TRL_LOSSES, *MICRO_BATCHES], TRL_LISTED)
    assert_covered(VERL, [*PPO, *GSPO, *CISPO, *DPPO, *KL, "kl_k3_extreme"], NO_VERL)


def cases(file: str, *names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


# TRL


@cases(TRL, *TRL_LOSSES)
def test_trl_loss_and_gradient(case: Case) -> None:
    given = Tokens.of(case)
    sequence = case.raw("importance_sampling_level") == "sequence"
    ratio = given.sequence_ratio if sequence else given.ratio
    low, high = case.inputs.get("eps_lo", 0.2), case.inputs.get("eps_hi", 0.28)
    if case.raw("loss_type") == "cispo":
        losses = cispo(given.new, ratio, given.advantages, cap=high)
    else:
        losses = clipped_surrogate(ratio, given.advantages, low, high)
    if "delta" in case.inputs:  # two-sided clipping is the dual clip with this cap
        losses = dual_clip(losses, given.advantages, case.raw("delta"))
    if "is_ratio" in case.inputs:
        weights = importance_weights(given.old, given.rollout, given.mask, given.lengths, level="token", cap=1.5)
        torch.testing.assert_close(weights, given.packed(case.input("is_ratio")), **EXACT)
        losses = losses * weights
    kl = kl_estimate(given.new, given.reference, "k3")
    losses = losses + case.raw("beta") * kl * (given.ratio if "biaskl" in case.inputs else 1)
    loss = given.mean(losses, *AGGREGATIONS[case.raw("loss_type")])
    torch.testing.assert_close(loss, case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, given.new), given.packed(case.output("grad")), **EXACT)
    if "clip_ratio/region_mean" in case.outputs["metrics"] and not sequence:
        away = clipped_away(given.ratio, given.advantages, low, high)[given.mask].double().mean()
        assert away.item() == pytest.approx(case.outputs["metrics"]["clip_ratio/region_mean"], rel=1e-12)


@cases(TRL, *MICRO_BATCHES)
def test_trl_micro_batches_that_change_the_bnpo_loss_change_none_of_ours(case: Case) -> None:
    """Micro-batches of 8 and 5 tokens: bnpo divides each by its own tokens, ours by the 13 of the step."""
    given = Tokens.of(case)
    aggregation, horizon = AGGREGATIONS[case.raw("loss_type")]
    total = terms(given.mask, given.lengths, aggregation)
    sums, denominators = [], []
    for rows in ((0, 2), (2, 4)):
        tokens = slice(*(int(given.lengths[:row].sum()) for row in rows))
        mask, lengths = given.mask[tokens], given.lengths[rows[0] : rows[1]]
        ratio = bounded_ratio(given.new[tokens], given.old[tokens])
        losses = clipped_surrogate(ratio, given.advantages[tokens], 0.2, 0.28)
        sums.append(weighted_sum(losses, token_weights(mask, lengths, aggregation, horizon)) / total)
        denominators.append(terms(mask, lengths, aggregation))
    loss = torch.stack(sums).sum()
    assert sum(denominators) == total
    torch.testing.assert_close(loss, case.output("full_batch_loss"), **EXACT)
    if case.name == "micro_batches_bnpo":
        assert case.outputs["sum"] == pytest.approx(0.5497811, abs=1e-7)
        assert loss.item() == pytest.approx(0.4051443, abs=1e-7)
        return
    torch.testing.assert_close(torch.stack(sums), case.output("loss_of_each_micro_batch"), **EXACT)
    torch.testing.assert_close(gradient(loss, given.new), given.packed(case.output("grad")), **EXACT)


# verl


@cases(VERL, *PPO)
def test_verl_ppo_loss_has_a_dual_clip_of_3_unless_told_otherwise(case: Case) -> None:
    given = Tokens.of(case)
    low, high = case.inputs.get("clip_ratio_low", 0.2), case.inputs.get("clip_ratio_high", 0.2)
    losses = clipped_surrogate(given.ratio, given.advantages, low, high)
    losses = dual_clip(losses, given.advantages, case.inputs.get("clip_ratio_c", 3.0))
    if "rollout_is_weights" in case.inputs:
        weights = importance_weights(given.old, given.rollout, given.mask, given.lengths, level="token", cap=2.0)
        torch.testing.assert_close(weights, given.packed(tensor(case.raw("rollout_is_weights"))), **EXACT)
        losses = losses * weights
    aggregation = case.raw("loss_agg_mode")
    if aggregation == "token-sum":
        loss = weighted_sum(losses, token_weights(given.mask, given.lengths, "token-mean"))
    else:
        loss = given.mean(losses, aggregation, case.raw("loss_scale_factor"))
    assert_verl(case, given, loss, value=True)


@cases(VERL, *GSPO)
def test_verl_gspo(case: Case) -> None:
    given = Tokens.of(case)
    low, high = case.inputs.get("clip_ratio_low", 0.2), case.inputs.get("clip_ratio_high", 0.2)
    losses = clipped_surrogate(given.sequence_ratio, given.advantages, low, high)
    assert_verl(case, given, given.mean(losses, "seq-mean-token-mean"), value=True)


@cases(VERL, *CISPO)
def test_verl_cispo_bounds_the_ratio_around_1(case: Case) -> None:
    given = Tokens.of(case)
    low, high = case.inputs.get("clip_ratio_low", 0.2), case.inputs.get("clip_ratio_high", 0.2)
    losses = cispo(given.new, given.ratio, given.advantages, floor=1 - low, cap=1 + high)
    assert_verl(case, given, given.mean(losses, "token-mean"), value=True)


@cases(VERL, *DPPO)
def test_verl_dppo_drops_the_same_tokens_and_has_another_value_with_our_gradient(case: Case) -> None:
    """It writes `-A sg(r) log pi` for the tokens it keeps: CISPO on them."""
    given = Tokens.of(case)
    losses, dropped = dppo(given.new, given.old, given.advantages, case.raw("clip_ratio"))
    assert_verl(case, given, given.mean(losses, "token-mean"), value=False)
    kept = torch.where(dropped, 0, given.ratio)
    theirs = cispo(given.new, kept, given.advantages, cap=case.raw("clip_ratio_c"))
    assert_verl(case, given, given.mean(theirs, "token-mean"), value=True)


@cases(VERL, *KL)
def test_verl_kl_estimates(case: Case) -> None:
    """A plus means: the value of this estimate with the gradient of k2."""
    given = Tokens.of(case)
    kind = case.raw("kl_penalty")
    kl = kl_estimate(given.new, given.reference, kind.removesuffix("+"))
    if kind.endswith("+"):
        squared = kl_estimate(given.new, given.reference, "k2")
        kl = squared + (kl - squared).detach()
    torch.testing.assert_close(given.trained(kl), given.packed(case.output("kl_per_token_masked")), **EXACT)
    pulled = gradient(given.trained(kl).sum(), given.new)
    torch.testing.assert_close(pulled, given.packed(case.output("grad")), **EXACT)


@cases(VERL, "kl_k3_extreme")
def test_verl_caps_k3_at_10_and_lets_go_where_ours_still_pulls(case: Case) -> None:
    """Differences 0, 3, 15, 25: e^3 - 4 and e^15 - 16 with gradients 1 - e^d; at 25 the cap, e^20 - 21, and 0."""
    new = case.input("logprob").requires_grad_()
    kl = kl_estimate(new, torch.full_like(new, case.raw("ref_logprob")), "k3")
    exponentials = torch.tensor([0.0, 3.0, 15.0, 20.0], dtype=torch.float64).exp()
    torch.testing.assert_close(kl, exponentials - torch.tensor([1.0, 4.0, 16.0, 21.0]), **EXACT)
    expected = torch.cat([1 - exponentials[:3], torch.zeros(1, dtype=torch.float64)])
    torch.testing.assert_close(gradient(kl.sum(), new), expected, **EXACT)
    assert case.outputs["kl"] == [0.0, 10.0, 10.0, 10.0]
    assert case.outputs["grad"] == [0.0, 0.0, 0.0, 0.0]


def assert_verl(case: Case, given: Tokens, loss: torch.Tensor, *, value: bool) -> None:
    close = VERL_SEQUENCE_MEAN if case.inputs["loss_agg_mode"] == "seq-mean-token-mean" else EXACT
    if value:
        torch.testing.assert_close(loss, case.output("loss"), **close)
    torch.testing.assert_close(gradient(loss, given.new), given.packed(case.output("grad")), **close)
