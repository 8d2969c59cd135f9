"""Losses on numbers: gradients by autograd, closed forms, and what overflows elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.algorithms.losses import (
    bounded_ratio,
    clipped_away,
    clipped_surrogate,
    denoising_error,
    divergence_masked_surrogate,
    flow_matching,
    implied_velocities,
    optimality,
    step_kl,
)

LOW, HIGH = 0.1, 0.2


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def surrogate(log_ratio: float, advantage: float) -> tuple[float, float]:
    """The clipped loss of one element and its gradient by the log-probability."""
    new = one(log_ratio).requires_grad_()
    loss = clipped_surrogate(bounded_ratio(new, one(0.0)), one(advantage), LOW, HIGH)
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.item()


# Ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 1e4, -1e4])
def test_a_ratio_of_a_huge_log_ratio_has_a_finite_value_and_gradient(dtype: torch.dtype, log_ratio: float) -> None:
    """exp(200) overflows float32; clamped after the exponential, its gradient would be 0 x inf = NaN."""
    new = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
    ratio = bounded_ratio(new, torch.zeros(1, 1, dtype=dtype))
    ratio.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == 0.0
    assert ratio.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)), rel=5e-3)


def test_within_the_bound_the_ratio_and_its_gradient_are_the_exponential() -> None:
    for log_ratio in (-19.9, -1.0, 0.0, 1e-4, 19.9):
        new = one(log_ratio).requires_grad_()
        ratio = bounded_ratio(new, one(0.0))
        ratio.backward()
        assert new.grad is not None
        assert ratio.item() == new.grad.item() == pytest.approx(math.exp(log_ratio), rel=1e-14)


def test_a_log_probability_that_is_nan_stays_nan() -> None:
    new = one(math.nan).requires_grad_()
    loss = clipped_surrogate(bounded_ratio(new, one(0.0)), one(1.0), LOW, HIGH)
    loss.backward()
    assert new.grad is not None
    assert math.isnan(loss.item())
    assert math.isnan(new.grad.item())


def test_a_small_ratio_is_exact_where_bfloat16_would_be_1() -> None:
    new, old = torch.tensor([[-1.001]]), torch.tensor([[-1.000]])
    assert bounded_ratio(new, old).item() == pytest.approx(0.9990005, abs=1e-7)


# Clipped surrogate


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.0, 0.1, 0.5])
def test_the_gradient_is_that_of_the_ratio_or_exactly_0_where_the_clip_takes_it(
    advantage: float, log_ratio: float
) -> None:
    """Clipped away: A > 0 beyond 1.2, A < 0 below 0.9. Beyond the other end the gradient pulls back, unclipped."""
    ratio = math.exp(log_ratio)
    away = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
    loss, gradient = surrogate(log_ratio, advantage)
    assert gradient == (0.0 if away else pytest.approx(-advantage * ratio, rel=1e-12))
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    assert loss == pytest.approx(max(-advantage * ratio, -advantage * clipped), rel=1e-12)
    assert clipped_away(one(ratio), one(advantage), LOW, HIGH).item() == away


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_both_signs_are_clipped_somewhere(advantage: float) -> None:
    assert surrogate(math.copysign(0.5, advantage), advantage)[1] == 0.0
    assert surrogate(-math.copysign(0.5, advantage), advantage)[1] != 0.0


def test_at_ratio_1_the_gradient_is_the_policy_gradient() -> None:
    assert surrogate(0.0, 3.0) == (-3.0, -3.0)


def test_an_advantage_of_0_pulls_nowhere() -> None:
    assert surrogate(0.5, 0.0) == (0.0, 0.0)
    assert not clipped_away(one(2.0), one(0.0), LOW, HIGH).item()


# Divergence mask


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "kl", "dropped"),
    [
        (0.1, 2.0, 0.5, True),
        (-0.1, -2.0, 0.5, True),
        (-0.1, 2.0, 0.5, False),  # moves back
        (0.1, -2.0, 0.5, False),
        (0.1, 2.0, 0.49, False),  # still near
        (0.0, 2.0, 0.5, False),  # has not moved
        (0.0, -2.0, 0.5, False),
        (5.0, 2.0, 0.0, False),  # a ratio alone drops nothing
    ],
)
def test_a_step_is_dropped_where_it_is_far_and_moves_away(
    log_ratio: float, advantage: float, kl: float, dropped: bool
) -> None:
    new = one(log_ratio).requires_grad_()
    ratio = bounded_ratio(new, one(0.0))
    loss, found = divergence_masked_surrogate(ratio, one(advantage), one(kl), 0.5)
    loss.backward()
    assert new.grad is not None
    assert found.item() == dropped
    expected = 0.0 if dropped else -advantage * math.exp(log_ratio)
    assert loss.item() == new.grad.item() == pytest.approx(expected, rel=1e-12)


def test_a_kl_of_one_step_is_the_mean_square_in_units_of_twice_the_variance() -> None:
    """Means differ by 0.1 in one of two elements, std 0.5: (0.01 + 0) / 2 / (2 x 0.25) = 0.01."""
    means, other = torch.zeros(1, 2, 1, 1, 2), torch.zeros(1, 2, 1, 1, 2)
    means[0, 0, 0, 0, 0] = 0.1
    stds = torch.full((1, 2, 1, 1, 1), 0.5)
    torch.testing.assert_close(step_kl(means, other, stds), torch.tensor([[0.01, 0.0]]))


# DiffusionNFT


def nft(velocity: float, *, old: float, target: float, beta: float, quality: float) -> tuple[float, float]:
    """q |v+ - u|^2 + (1 - q) |v- - u|^2 of one element, and its gradient: at sigma 1 and x0 = 0, x0(v) = u - v."""
    v = torch.tensor([velocity], dtype=torch.float64, requires_grad=True)
    u, zero, sigma = (torch.tensor([x], dtype=torch.float64) for x in (target, 0.0, 1.0))
    errors = [
        denoising_error(implied[:, None], u[:, None], zero[:, None], sigma, adaptive_weight=False)
        for implied in implied_velocities(v, torch.full_like(v, old), beta)
    ]
    loss = quality * errors[0] + (1 - quality) * errors[1]
    loss.backward()
    assert v.grad is not None
    return loss.item(), v.grad.item()


def test_optimality_of_advantages_1_minus_10_and_7_at_a_maximum_of_5() -> None:
    advantages = torch.tensor([1.0, -10.0, 7.0, 0.0])
    torch.testing.assert_close(optimality(advantages, 5.0), torch.tensor([0.6, 0.0, 1.0, 0.5]))


def test_the_objective_away_from_the_old_policy() -> None:
    """v+ = 1, v- = -1, u = 0.5: 0.6 x 0.25 + 0.4 x 2.25 = 1.05."""
    assert nft(1.0, old=0.0, target=0.5, beta=1.0, quality=0.6)[0] == pytest.approx(1.05, rel=1e-12)


@pytest.mark.parametrize(("quality", "gradient"), [(0.6, -0.2), (0.5, 0.0), (0.4, 0.2)])
def test_at_the_old_policy_the_value_is_blind_to_quality_and_the_gradient_is_not(
    quality: float, gradient: float
) -> None:
    """2 b (2 q - 1) (v_old - u) at v_old = 0, u = 0.5, b = 1."""
    loss, found = nft(0.0, old=0.0, target=0.5, beta=1.0, quality=quality)
    assert loss == pytest.approx(0.25, rel=1e-12)
    assert found == pytest.approx(gradient, abs=1e-12)


def test_beta_scales_the_pull() -> None:
    assert nft(0.0, old=0.0, target=0.5, beta=0.25, quality=0.6)[1] == pytest.approx(-0.05, rel=1e-12)


def test_implied_policies_lie_on_both_sides_of_the_old_one() -> None:
    positive, negative = implied_velocities(torch.tensor([3.0]), torch.tensor([1.0]), 0.25)
    assert (positive.item(), negative.item()) == (1.5, 0.5)


def test_the_adaptive_weight_is_the_mean_absolute_error_and_carries_no_gradient() -> None:
    """Residuals 3 and 1: (9 + 1) / 2 / 2 = 2.5; d/dv = -2 r / 2 / 2 each."""
    velocity = torch.tensor([[-3.0, -1.0]], requires_grad=True)
    zero, sigma = torch.zeros(1, 2), torch.ones(1)
    error = denoising_error(velocity, zero, zero, sigma, adaptive_weight=True)
    error.sum().backward()
    assert error.item() == 2.5
    assert velocity.grad is not None
    assert velocity.grad.tolist() == [[-1.5, -0.5]]


def test_a_perfect_prediction_has_error_0_and_a_finite_gradient() -> None:
    velocity = torch.zeros(1, 2, requires_grad=True)
    zero = torch.zeros(1, 2)
    error = denoising_error(velocity, zero, zero, torch.ones(1), adaptive_weight=True)
    error.sum().backward()
    assert error.item() == 0.0
    assert velocity.grad is not None
    assert velocity.grad.tolist() == [[0.0, 0.0]]


# Flow matching


def test_flow_matching_is_the_mean_square_to_noise_minus_data_for_each_row() -> None:
    """Targets 2 and -1: ((0 - 2)^2 + (1 + 1)^2) / 2 = 4 and a perfect row."""
    velocity = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    x_0, noise = torch.tensor([[1.0, 3.0]] * 2), torch.tensor([[3.0, 2.0]] * 2)
    assert flow_matching(velocity, x_0, noise).tolist() == [4.0, 0.0]
