"""Losses on the forward process: DiffusionNFT (file 23), distillation, flow matching, time warps (file 25)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from tests.golden.recorded import recorded, replayed
from unirl.algorithms.losses import denoising_error, flow_matching, implied_velocities, optimality, step_kl
from unirl.sde.schedule import shift_sigmas
from unirl.sde.strategy import gaussian_kl, per_row, row_mean
from unirl.types.advantages import group_relative

NFT, OTHER = "23_loss_diffusion_nft", "25_loss_distill_sft_time"
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}
GRADIENT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-14}

PLAIN = [name for name in load(NFT) if name.startswith(("nvlabs_beta", "flow_factory", "verl_omni_beta"))]
MODES = [name for name in load(NFT) if "adv_mode" in name or "reward_prob" in name]
UNIRL = [name for name in load(NFT) if name.startswith("unirl")]
GROUPED = [name for name in load(NFT) if "group_advantages" in name]
DISTILL = [name for name in load(OTHER) if "distill" in name or "opd" in name]


def test_every_case_is_tested() -> None:
    assert_covered(NFT, [*PLAIN, *MODES, *UNIRL, *GROUPED, "nvlabs_at_old_policy"], {})
    assert_covered(OTHER, [*DISTILL, "unirl_flow_match_sft", "time_shift3.0", "time_shift5.0"], {})


def cases(file: str, *names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def policy_loss(
    case: Case,
    velocity: torch.Tensor,
    quality: torch.Tensor,
    *,
    sigma: torch.Tensor | None = None,
    old_velocity: torch.Tensor | None = None,
    beta: float = 1.0,
    adaptive_weight: bool = True,
) -> torch.Tensor:
    """Ours for the points of the file, `(4,)`: without the factor A_max / beta."""
    x_0 = case.input("x0")
    sigma = case.input("t") if sigma is None else sigma
    level = per_row(sigma, x_0)
    x_t = (1 - level) * x_0 + level * case.input("eps")
    old_velocity = case.input("v_old") if old_velocity is None else old_velocity
    positive, negative = (
        denoising_error(implied, x_t, x_0, sigma, adaptive_weight=adaptive_weight)
        for implied in implied_velocities(velocity, old_velocity, beta)
    )
    return quality * positive + (1 - quality) * negative


# DiffusionNFT


@cases(NFT, *PLAIN)
def test_nft_loss_and_gradient(case: Case) -> None:
    """loss of the authors = (A_max / beta) ours + kl_beta |v - v_ref|^2."""
    beta = case.inputs["nft_beta"] if "nft_beta" in case.inputs else case.inputs["beta"]
    kl_beta = case.inputs.get("kl_beta", case.inputs.get("ref_kl_coef", 0.0))
    velocity = case.input("v_new").requires_grad_()
    quality = optimality(case.input("advantages"), 5.0)
    losses = policy_loss(case, velocity, quality, beta=beta)
    distance = row_mean((velocity - case.input("v_ref")) ** 2)
    loss = (5.0 / beta) * losses.mean() + kl_beta * distance.mean()
    torch.testing.assert_close(loss, case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, velocity), case.output("grad_velocity"), **GRADIENT)
    if "r" in case.outputs:
        torch.testing.assert_close(quality, case.output("r"), **EXACT)
        for column, branch in (("positive_loss", 1.0), ("negative_loss", 0.0)):
            alone = policy_loss(case, velocity.detach(), torch.full((4,), branch, dtype=torch.float64), beta=beta)
            torch.testing.assert_close(alone, case.output(column), **EXACT)
        torch.testing.assert_close(losses.mean() / beta, case.output("unweighted_policy_loss"), **EXACT)
        torch.testing.assert_close(distance.mean(), case.output("kl_div_loss"), **EXACT)


@cases(NFT, "nvlabs_at_old_policy")
def test_nft_at_the_old_policy_pulls_by_the_advantage(case: Case) -> None:
    """Both branches are one there: the gradient is (2q - 1) times that of the denoising error, 0 where A is 0."""
    velocity = case.input("v_old").requires_grad_()
    loss = 5.0 * policy_loss(case, velocity, optimality(case.input("advantages"), 5.0)).mean()
    torch.testing.assert_close(loss, case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(loss, velocity), case.output("grad_velocity"), rtol=1e-10, atol=1e-13)
    assert case.input("advantages")[3] == 0
    assert gradient(loss, velocity)[3].abs().max() < 1e-15


@cases(NFT, *MODES)
def test_nft_advantage_modes_change_the_advantages_before_ours(case: Case) -> None:
    """`positive_only` and its like are no option here: they are another A, saturated first and then picked from."""
    advantages = case.input("advantages").clamp(-5, 5)
    mode = case.raw("adv_mode")
    changed = {
        "all": advantages,
        "positive_only": advantages.clamp(min=0),
        "negative_only": advantages.clamp(max=0),
        "binary": advantages.sign(),
        "one_only": (advantages > 0).double(),
    }[mode]
    quality = optimality(changed, 5.0)
    expected = case.output("r" if "r" in case.outputs else "reward_prob")
    torch.testing.assert_close(quality, expected, **EXACT)
    if "loss" in case.outputs:
        velocity = case.input("v_new").requires_grad_()
        loss = 5.0 * policy_loss(case, velocity, quality).mean()
        torch.testing.assert_close(loss, case.output("loss"), **EXACT)
        torch.testing.assert_close(gradient(loss, velocity), case.output("grad_velocity"), **GRADIENT)


@cases(NFT, *UNIRL)
def test_unirl_nft_optimises_the_mean_over_times_and_reports_the_sum(case: Case) -> None:
    beta, reference_weight = case.raw("beta"), case.raw("ref_deviation_coef")
    quality = optimality(case.input("advantages"), case.raw("adv_std_saturate"))
    optimised = torch.zeros((), dtype=torch.float64)
    velocities = []
    for level, suffix in zip(case.raw("sigmas")[:2], ("", "_second"), strict=True):
        velocity, old, ref = (case.input(name + suffix).clone() for name in ("v_new", "v_old", "v_ref"))
        velocities.append(velocity.requires_grad_())
        sigma = torch.full((4,), level, dtype=torch.float64)
        losses = policy_loss(
            case,
            velocity,
            quality,
            sigma=sigma,
            old_velocity=old,
            beta=beta,
            adaptive_weight=case.raw("use_adaptive_weight"),
        )
        distance = row_mean((velocity - ref) ** 2)
        optimised = optimised + ((5.0 / beta) * losses + reference_weight * distance).mean() / 2
    torch.testing.assert_close(optimised, case.output("loss_optimised_mean"), **EXACT)
    torch.testing.assert_close(2 * optimised, case.output("loss_reported_sum_over_timesteps"), **EXACT)
    for index, velocity in enumerate(velocities):
        torch.testing.assert_close(gradient(optimised, velocity), case.output(f"grad_velocity_step{index}"), **GRADIENT)


@cases(NFT, *GROUPED)
def test_verl_omni_nft_advantages_use_the_unbiased_global_std(case: Case) -> None:
    rewards, groups = case.input("rewards"), [str(uid) for uid in case.raw("uid")]
    if case.raw("norm_by_std"):
        factor = math.sqrt(3 / 4)
        ours = group_relative(rewards, groups, scale="global_std", eps=1e-4 * factor).double() * factor
    else:
        ours = group_relative(rewards, groups, scale="none").double()
    torch.testing.assert_close(ours, case.output("advantages"), rtol=2e-7, atol=0)


# distillation, supervised training, time warps


@cases(OTHER, *(name for name in DISTILL if "opd" in name))
def test_unirl_distillation_is_our_step_kl_or_half_the_square(case: Case) -> None:
    segment = recorded(case)
    student = case.input("v_student").requires_grad_()
    ours, teacher = replayed(case, segment, student), replayed(case, segment, case.input("v_teacher"))
    kl = step_kl(ours.means, teacher.means, ours.stds)
    if not case.raw("add_kl_coefficient"):
        kl = kl * ours.stds.flatten(1) ** 2
    torch.testing.assert_close(kl.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(kl.mean(), student), case.output("grad_velocity"), **GRADIENT)


@cases(OTHER, "verl_omni_distill_kl")
def test_verl_omni_distillation_of_means(case: Case) -> None:
    shape = case.raw("shape")
    student = case.input("mean_student").reshape(shape).requires_grad_()
    kl = gaussian_kl(student, case.input("mean_teacher").reshape(shape), per_row(case.input("std_dev_t"), student))
    torch.testing.assert_close(kl.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(kl.mean(), student), case.output("grad_mean"), **GRADIENT)


@cases(OTHER, "verl_omni_distill_fm_mse")
def test_verl_omni_distillation_of_velocities(case: Case) -> None:
    """The flow-matching loss with the teacher's velocity as `eps - x0`."""
    student, teacher = case.input("v_student").requires_grad_(), case.input("v_teacher")
    losses = flow_matching(student, torch.zeros_like(teacher), teacher)
    torch.testing.assert_close(losses.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(losses.mean(), student), case.output("grad_velocity"), **GRADIENT)


@cases(OTHER, "unirl_flow_match_sft")
def test_unirl_flow_matching(case: Case) -> None:
    velocity = case.input("v_pred").requires_grad_()
    losses = flow_matching(velocity, case.input("x0"), case.input("noise"))
    torch.testing.assert_close(losses, case.output("per_sample_mse"), **EXACT)
    torch.testing.assert_close(losses.mean(), case.output("loss"), **EXACT)
    torch.testing.assert_close(gradient(losses.mean(), velocity), case.output("grad_velocity"), **GRADIENT)


@cases(OTHER, "time_shift3.0", "time_shift5.0")
def test_the_time_shift_moves_towards_noise_and_flow_factory_moves_the_other_way(case: Case) -> None:
    shift, uniform, normal = case.raw("shift"), case.input("uniform_draws"), case.input("normal_draws")
    torch.testing.assert_close(shift_sigmas(uniform, shift), case.output("flow_shift_sigma_of_uniform"), **EXACT)
    ours = shift_sigmas(torch.sigmoid(normal), shift)
    for authors in ("unirl_logit_normal_sigma", "awm_official_logit_normal_sigma"):  # float32 inside
        torch.testing.assert_close(ours, case.output(authors), rtol=3e-7, atol=0)
    reversed_axis = case.output("flow_factory_logit_normal_t_over_1000")
    torch.testing.assert_close(1 - ours, reversed_axis, rtol=1e-5, atol=0)
    # The median: 0.75 at shift 3, 0.25 on the reversed axis.
    assert ours[2].item() == pytest.approx(shift / (shift + 1))
    assert reversed_axis[2].item() == pytest.approx(1 / (shift + 1), rel=1e-6)
