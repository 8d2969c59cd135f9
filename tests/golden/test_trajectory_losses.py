"""Losses on recorded trajectories: Flow-GRPO and its family (file 20), Flow-DPPO (file 22)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from tests.golden.recorded import recorded, replayed
from unirl.algorithms.losses import bounded_ratio, clipped_away, clipped_surrogate, divergence_masked_surrogate, step_kl
from unirl.sde.steps import Schedule
from unirl.sde.strategy import STRATEGIES, SDEStrategy, gaussian_kl, row_mean

CLIP, DIVERGENCE = "20_loss_flowgrpo", "22_loss_flow_dppo"
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}
GRADIENT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-14}

FLOW_GRPO = [name for name in load(CLIP) if name.startswith("flow_grpo")]
UNIRL = [name for name in load(CLIP) if name.startswith("unirl")]
GIVEN = ("dance_grpo", "mix_grpo", "verl_omni_clip", "flow_factory_clip")
GIVEN_RATIO = [name for name in load(CLIP) if name.startswith(GIVEN)]
KL_ALONE = ("verl_omni_kl_sde", "verl_omni_kl_dance", "flow_factory_kl_v-based", "flow_factory_kl_x-based")
UNIRL_DPPO = [name for name in load(DIVERGENCE) if name.startswith("unirl")]
VERL_DPPO = [name for name in load(DIVERGENCE) if name.startswith("verl_omni")]


def test_every_case_is_tested() -> None:
    assert_covered(CLIP, [*FLOW_GRPO, *UNIRL, *GIVEN_RATIO, *KL_ALONE], {})
    assert_covered(DIVERGENCE, [*UNIRL_DPPO, *VERL_DPPO], {})


def cases(file: str, *names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


class OneStepEach:
    """Flow-GRPO and verl-omni cases: each of 4 samples at a step of its own, the next latent drawn under `v_old`."""

    def __init__(self, case: Case) -> None:
        sigmas = case.input("sigmas", torch.float32)
        self.case = case
        self.x = case.input("x")
        self.step = Schedule(sigmas, 1000 * sigmas[:-1]).at(torch.tensor(case.raw("step_index_per_sample")))
        names = {"sde": "flow", "dance": "dance", "cps": "cps_unnormalised"}
        self.strategy: SDEStrategy = STRATEGIES[names[case.raw("kernel")]](case.raw("noise_level"))
        self.std = self.strategy.std(self.step, self.x)
        self.minus_dt = self.step.sigma.double() - self.step.sigma_next.double()
        self.drawn = self.strategy.draw(self.mean(case.input("v_old")), self.std, case.input("noise"))

    def mean(self, velocity: torch.Tensor) -> torch.Tensor:
        return self.strategy.mean(self.x, velocity, self.step)

    def log_prob(self, velocity: torch.Tensor) -> torch.Tensor:
        return self.strategy.log_prob(self.drawn, self.mean(velocity), self.std)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


# clipped surrogate, KL


@cases(CLIP, *FLOW_GRPO)
def test_flow_grpo_loss_and_gradients(case: Case) -> None:
    """Its KL leaves -dt out of the variance: `kl_flow_grpo = -dt kl_gaussian`, sample by sample."""
    given = OneStepEach(case)
    velocity = case.input("v_new").requires_grad_()
    old, new = given.log_prob(case.input("v_old")), given.log_prob(velocity)
    torch.testing.assert_close(old, case.output("old_log_prob"), **EXACT)
    torch.testing.assert_close(new, case.output("new_log_prob"), **EXACT)
    ratio = bounded_ratio(new[:, None], old[:, None])
    torch.testing.assert_close(ratio[:, 0], case.output("ratio"), **EXACT)
    clip = case.raw("clip_range")
    advantages = case.input("advantages").clamp(-case.raw("adv_clip_max"), case.raw("adv_clip_max"))[:, None]
    policy = clipped_surrogate(ratio, advantages, clip, clip).mean()
    torch.testing.assert_close(policy, case.output("policy_loss"), **EXACT)
    torch.testing.assert_close(gradient(policy, new), case.output("grad_log_prob"), **EXACT)
    kl = gaussian_kl(given.mean(velocity), given.mean(case.input("v_ref")), given.std)
    loss = policy + case.raw("beta") * (kl * given.minus_dt).mean()
    torch.testing.assert_close(loss, case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, velocity), case.output("grad_velocity"), **GRADIENT)
    if case.raw("beta") > 0:
        torch.testing.assert_close((kl * given.minus_dt).mean(), case.output("kl_loss"), **EXACT)
        torch.testing.assert_close(kl.mean(), case.output("kl_gaussian"), **EXACT)
        torch.testing.assert_close(policy + case.raw("beta") * kl.mean(), case.output("loss_with_kl_gaussian"), **EXACT)
        assert case.outputs["kl_gaussian"] > 3 * case.outputs["kl_loss"]


@cases(CLIP, *UNIRL)
def test_unirl_loss_over_samples_and_steps(case: Case) -> None:
    """Through our replay of a recorded trajectory; its KL is the Gaussian one, and A is not clamped."""
    segment = recorded(case)
    velocity = case.input("v_new").requires_grad_()
    old, new = replayed(case, segment, case.input("v_old")), replayed(case, segment, velocity)
    torch.testing.assert_close(old.log_probs, case.output("old_log_prob"), **EXACT)
    torch.testing.assert_close(segment.at(segment.sde_indices + 1), case.output("stored_next_latent"), **EXACT)
    ratio = bounded_ratio(new.log_probs, old.log_probs)
    advantages = case.input("advantages")[:, None].expand(ratio.shape)
    clip, beta = case.raw("clip_range"), case.raw("beta")
    policy = clipped_surrogate(ratio, advantages, clip, clip).mean()
    torch.testing.assert_close(policy, case.output("policy_loss"), **EXACT)
    kl = step_kl(new.means, replayed(case, segment, case.input("v_ref")).means, new.stds)
    loss = policy + beta * kl.mean()
    torch.testing.assert_close(loss, case.output("loss"), **EXACT)
    expected = case.output("grad_velocity_times_loss_scale")
    torch.testing.assert_close(gradient(loss * case.raw("loss_scale"), velocity), expected, **GRADIENT)
    metrics = case.outputs["metrics"]
    assert ((ratio > 1 + clip) | (ratio < 1 - clip)).double().mean().item() == pytest.approx(metrics["clip_fraction"])
    assert ratio.mean().item() == pytest.approx(metrics["ratio_mean"], rel=1e-12)
    if beta > 0:
        torch.testing.assert_close(kl.mean(), case.output("kl_ref_mean"), **EXACT)


@cases(CLIP, *GIVEN_RATIO)
def test_clip_loss_of_given_log_probs(case: Case) -> None:
    """DanceGRPO and MixGRPO divide by micro-batches times steps; MixGRPO adds half the squared log-ratio, its "KL"."""
    new = case.input("new_log_prob").requires_grad_()
    old = case.input("old_log_prob")
    clip = case.inputs["clip_ratio"] if "clip_ratio" in case.inputs else case.inputs["clip_range"]
    low, high = (-clip[0], clip[1]) if isinstance(clip, list) else (clip, clip)
    advantages = case.input("advantages").clamp(-5, 5)[:, None]
    losses = clipped_surrogate(bounded_ratio(new, old)[:, None], advantages, low, high)[:, 0]
    if "loss" in case.outputs:
        torch.testing.assert_close(losses.mean(), case.output("loss"), **EXACT)
        torch.testing.assert_close(gradient(losses.mean(), new), case.output("grad_log_prob"), **EXACT)
        return
    squared = 0.5 * (new - old) ** 2
    terms = case.raw("gradient_accumulation_steps") * case.raw("train_timesteps")
    losses = (losses + case.inputs.get("kl_coeff", 0.0) * squared) / terms
    torch.testing.assert_close(losses, case.output("loss_per_sample"), **EXACT)
    torch.testing.assert_close(gradient(losses.sum(), new), case.output("grad_log_prob"), **EXACT)
    if "kl_loss_per_sample" in case.outputs:
        torch.testing.assert_close(squared / terms, case.output("kl_loss_per_sample"), **EXACT)


@cases(CLIP, "verl_omni_clip0.0001")
def test_clipped_away_counts_only_where_the_gradient_is_zero(case: Case) -> None:
    """verl-omni calls every ratio outside the range clipped; here all four also lose their gradient."""
    ratio = bounded_ratio(case.input("new_log_prob"), case.input("old_log_prob"))[:, None]
    advantages = case.input("advantages")[:, None]
    assert ratio[:, 0].tolist() == pytest.approx([1.0512711, 0.8607080, 1.0189269, 0.9453028], abs=1e-7)
    assert clipped_away(ratio, advantages, 1e-4, 1e-4).tolist() == [[True]] * 4
    assert clipped_away(ratio, -advantages, 1e-4, 1e-4).tolist() == [[False]] * 4
    assert case.outputs["metrics"]["actor/pg_clipfrac"] == 1.0


@cases(CLIP, "verl_omni_kl_sde", "verl_omni_kl_dance")
def test_verl_omni_kl_lacks_minus_dt_for_the_flow_kernel_alone(case: Case) -> None:
    given = OneStepEach(case)
    means = given.mean(case.input("v_new")).requires_grad_()
    kl = gaussian_kl(means, given.mean(case.input("v_ref")), given.std)
    torch.testing.assert_close(kl.mean(), case.output("kl_gaussian"), **EXACT)
    theirs = kl * given.minus_dt if case.raw("kernel") == "sde" else kl
    torch.testing.assert_close(theirs.mean(), case.output("kl_loss"), **EXACT)
    expected = case.output("grad_mean").reshape(means.shape)
    torch.testing.assert_close(gradient(theirs.mean(), means), expected, **GRADIENT)


@cases(CLIP, "flow_factory_kl_v-based", "flow_factory_kl_x-based")
def test_flow_factory_kl_is_a_mean_square_without_a_variance(case: Case) -> None:
    given = OneStepEach(case)
    velocity, reference = case.input("v_new").requires_grad_(), case.input("v_ref")
    if case.raw("kl_type") == "v-based":
        distance = row_mean((velocity - reference) ** 2)
    else:
        distance = gaussian_kl(given.mean(velocity), given.mean(reference), given.std) * 2 * given.std.flatten() ** 2
    torch.testing.assert_close(distance.mean(), case.output("kl_div"), **EXACT)
    loss = case.raw("kl_beta") * distance.mean()
    torch.testing.assert_close(loss, case.output("kl_loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, velocity), case.output("grad_velocity"), **GRADIENT)


# Flow-DPPO


@cases(DIVERGENCE, *UNIRL_DPPO)
def test_unirl_flow_dppo(case: Case) -> None:
    segment = recorded(case)
    velocity = case.input("v_new").requires_grad_()
    old, new = replayed(case, segment, case.input("v_old")), replayed(case, segment, velocity)
    ratio = bounded_ratio(new.log_probs, old.log_probs)
    kl = step_kl(new.means.detach(), old.means, new.stds)
    torch.testing.assert_close(ratio, case.output("ratio"), **EXACT)
    torch.testing.assert_close(kl, case.output("kl_per_sample_step"), rtol=1e-11, atol=1e-16)
    advantages = case.input("advantages")[:, None].expand(ratio.shape)
    losses, dropped = divergence_masked_surrogate(ratio, advantages, kl, case.raw("kl_mask_threshold"))
    assert dropped.tolist() == case.outputs["dropped"]
    torch.testing.assert_close(losses.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(losses.mean(), velocity), case.output("grad_velocity"), **GRADIENT)


@cases(DIVERGENCE, *VERL_DPPO)
def test_verl_omni_flow_dppo_scales_the_dance_std_twice(case: Case) -> None:
    """Its Dance kernel returns the full std, and the loss multiplies by sqrt(-dt) again: a KL 1 / (-dt) too large."""
    given = OneStepEach(case)
    velocity = case.input("v_new").requires_grad_()
    ratio = bounded_ratio(given.log_prob(velocity), given.log_prob(case.input("v_old")))[:, None]
    kl = gaussian_kl(given.mean(velocity).detach(), given.mean(case.input("v_old")), given.std)
    torch.testing.assert_close(kl, case.output("kl_right"), rtol=1e-11, atol=1e-16)
    used = kl / given.minus_dt if case.raw("kernel") == "dance" else kl
    torch.testing.assert_close(used, case.output("kl_used"), rtol=1e-11, atol=1e-16)
    advantages, threshold = case.input("advantages")[:, None], case.raw("kl_mask_threshold")
    ours, _ = divergence_masked_surrogate(ratio, advantages, kl[:, None], threshold)
    torch.testing.assert_close(ours.mean(), case.output("right_loss"), **EXACT)
    theirs, _ = divergence_masked_surrogate(ratio, advantages, used[:, None], threshold)
    torch.testing.assert_close(theirs.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(theirs.mean(), velocity), case.output("grad_velocity"), **GRADIENT)
    differs = case.name == "verl_omni_dance_threshold0.02"
    assert (abs(case.outputs["loss"] - case.outputs["right_loss"]) > 0.5) is differs
