"""Generalised advantage estimation and the critic's loss, against UniRL 0.2.0 (file 12), verl and slime (file 34)."""

from __future__ import annotations

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from unirl.algorithms.token_losses import kl_estimate, terms, token_weights, value_loss, weighted_sum
from unirl.types.advantages import gae

UNIRL, VERL = load("12_adv_unirl"), load("34_ar_ppo_value_gae")
VERL_GAE = tuple(name for name in VERL if name.startswith("verl_gae"))
VERL_VALUE = tuple(name for name in VERL if name.startswith("verl_value_loss"))
SLIME_GAE = "slime_vanilla_gae_gamma0.9_lambda0.8"
WITHOUT_COUNTERPART = {"adaptive_kl_controller": "a KL coefficient that adapts itself"}


def test_every_case_of_verl_and_slime_is_tested_or_listed() -> None:
    tested = [*VERL_GAE, *VERL_VALUE, SLIME_GAE, "kl_in_reward"]
    assert_covered("34_ar_ppo_value_gae", tested, WITHOUT_COUNTERPART)


@pytest.mark.parametrize("name", ["gae_gamma0.9_lambda0.8", "gae_gamma1.0_lambda1.0"])
def test_unirl_packed_sequences(name: str) -> None:
    case = UNIRL[name]
    lengths = torch.tensor(case.raw("lengths"))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rewards, values = unpacked(case.input("token_rewards_packed"), mask), unpacked(case.input("values_packed"), mask)
    advantages, returns = gae(rewards, values, mask, gamma=case.raw("gamma"), lam=case.raw("lambda"))
    torch.testing.assert_close(advantages[mask], case.output("advantages_packed"), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(returns[mask], case.output("returns_packed"), rtol=1e-12, atol=1e-14)


def test_unirl_cuts_the_credit_at_a_hole_that_ours_carries_across() -> None:
    """Right: the numbers of the same sequence without the masked token (a tool's answer is no step of the policy)."""
    case = UNIRL["gae_2d_masked_hole"]
    rewards, values, mask = case.input("token_rewards"), case.input("values"), case.input("mask").bool()
    gamma, lam = case.raw("gamma"), case.raw("lambda")
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        kept = mask[row]
        dense = torch.ones(1, int(kept.sum()), dtype=torch.bool)
        expected = gae(rewards[row, kept][None], values[row, kept][None], dense, gamma=gamma, lam=lam)
        torch.testing.assert_close(advantages[row, kept], expected[0][0], rtol=1e-12, atol=0)
        torch.testing.assert_close(returns[row, kept], expected[1][0], rtol=1e-12, atol=0)
    authors = case.output("advantages")
    whole = (mask.cummin(1).values == mask).all(1)
    assert whole.tolist() == [True, False, True, True]
    torch.testing.assert_close(advantages[whole], authors[whole], rtol=1e-12, atol=1e-14)
    # Row 1 is masked at position 2: after the hole both agree, before it the authors lack the credit from behind.
    torch.testing.assert_close(advantages[1, 3:], authors[1, 3:], rtol=1e-12, atol=1e-14)
    assert ((advantages[1, :2] - authors[1, :2]).abs() > 0.01).all()


@pytest.mark.parametrize("name", VERL_GAE)
def test_verl_carries_the_credit_across_holes_as_ours_does(name: str) -> None:
    case = VERL[name]
    rewards, values, mask = case.input("token_level_rewards"), case.input("values"), case.shared[case.inputs["mask"]]
    mask = torch.tensor(mask).bool()
    advantages, returns = gae(rewards, values, mask, gamma=case.raw("gamma"), lam=case.raw("lambda"))
    torch.testing.assert_close(advantages, case.output("advantages_raw_masked"), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(returns, case.output("returns_masked"), rtol=1e-12, atol=1e-14)


def test_slime_on_padded_sequences() -> None:
    case: Case = VERL[SLIME_GAE]
    mask = case.input("mask").bool()
    rewards, values = case.input("token_level_rewards") * mask, case.input("values") * mask
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[mask], case.output("advantages")[mask], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(returns[mask], case.output("returns")[mask], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", VERL_VALUE)
def test_verl_value_loss(name: str) -> None:
    """It clips the new value to the old one; the mean of a sequence is divided by its tokens + 1e-8."""
    case = VERL[name]
    mask = case.input("mask").bool()
    lengths, aggregation = mask.sum(1), case.raw("loss_agg_mode")
    values = case.input("new_values")[mask].requires_grad_()
    old_values, returns = case.input("values")[mask], case.input("returns")[mask]
    losses, trained = value_loss(values, old_values, returns, case.raw("cliprange_value")), torch.ones(13).bool()
    weights = token_weights(trained, lengths, aggregation, case.raw("loss_scale_factor"))
    loss = weighted_sum(losses, weights) / terms(trained, lengths, aggregation)
    rtol = 1.1e-8 if aggregation == "seq-mean-token-mean" else 1e-12
    torch.testing.assert_close(loss, case.output("loss"), rtol=rtol, atol=0)
    pulled = torch.autograd.grad(loss, values)[0]
    torch.testing.assert_close(pulled, case.output("grad_values")[mask], rtol=rtol, atol=1e-14)


def test_a_kl_inside_the_rewards_is_k1_of_the_reference() -> None:
    case = VERL["kl_in_reward"]
    mask = case.input("mask").bool()
    kl = kl_estimate(case.input("old_log_prob")[mask], case.input("ref_log_prob")[mask], "k1")
    rewards = case.input("token_level_rewards")[mask] - case.raw("kl_ratio") * kl
    torch.testing.assert_close(rewards, case.output("token_rewards_masked")[mask], rtol=1e-12, atol=1e-14)


def unpacked(packed: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(mask.shape, dtype=packed.dtype)
    padded[mask] = packed
    return padded
