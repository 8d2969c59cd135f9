"""Losses of tokens on numbers: values, gradients by autograd, and what overflows elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.algorithms.packed import all_trained, f64, gradient
from unirl.algorithms.losses import bounded_ratio, clipped_away, clipped_surrogate
from unirl.algorithms.token_losses import (
    KLEstimator,
    cispo,
    dppo,
    drpo,
    dual_clip,
    importance_weights,
    kl_estimate,
    overlong_penalty,
    sequence_ratio,
    token_weights,
    value_loss,
    weighted_sum,
)

signs = pytest.mark.parametrize("advantage", [2.0, -2.0])


# KL


@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)]
)
def test_kl_estimates_of_log_probs_minus_1_and_minus_1_5(kind: KLEstimator, value: float, slope: float) -> None:
    new = f64(-1.0).requires_grad_()
    kl = kl_estimate(new, f64(-1.5), kind)
    assert kl.item() == pytest.approx(value, abs=1e-7)
    assert gradient(kl, new)[0] == pytest.approx(slope, abs=1e-7)


def test_each_estimate_is_unbiased_or_has_the_gradient_of_the_exact_kl() -> None:
    """Over 3 tokens, by summation: k1 and k3 have its mean; k2 its gradient, k3 that of KL(ref || pi), k1 none."""
    logits, reference = f64(0.3, -0.2, 1.1).requires_grad_(), torch.log_softmax(f64(0.0, 0.7, -0.4), 0)
    log_probs = torch.log_softmax(logits, 0)
    probs = log_probs.detach().exp()
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    forward = (reference.exp() * (reference - log_probs)).sum()
    expected = {kind: (probs * kl_estimate(log_probs, reference, kind)).sum() for kind in ("k1", "k2", "k3")}
    for kind in ("k1", "k3"):
        torch.testing.assert_close(expected[kind], exact, rtol=1e-12, atol=0)
    slopes = {kind: torch.autograd.grad(value, logits, retain_graph=True)[0] for kind, value in expected.items()}
    torch.testing.assert_close(slopes["k2"], torch.autograd.grad(exact, logits, retain_graph=True)[0])
    torch.testing.assert_close(slopes["k3"], torch.autograd.grad(forward, logits)[0])
    torch.testing.assert_close(slopes["k1"], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_far_above_has_a_capped_value_and_a_finite_gradient_that_an_optimizer_survives(dtype: torch.dtype) -> None:
    """exp(200) overflows: clamped after it, the value would be finite and the gradient NaN."""
    new = torch.tensor([-200.0], dtype=dtype, requires_grad=True)
    optimizer = torch.optim.AdamW([new], lr=0.1)
    kl = kl_estimate(new, torch.zeros(1, dtype=dtype), "k3")
    kl.sum().backward()
    optimizer.step()
    assert kl.item() == pytest.approx(math.exp(20) - 21, rel=5e-3)
    assert new.grad is not None
    assert new.grad.item() == 0.0
    assert new.isfinite().all()


def test_k3_at_5_is_exact_and_at_100_the_cap() -> None:
    kl = kl_estimate(torch.tensor([-5.0, -100.0]), torch.zeros(2), "k3").tolist()
    assert kl == pytest.approx([142.4131591, math.exp(20) - 21], rel=1e-7)


def test_k3_pulls_back_a_token_that_the_reference_would_never_write() -> None:
    """d = -30: the value is 29, and the gradient 1 as for any d far below."""
    new = f64(0.0).requires_grad_()
    kl = kl_estimate(new, f64(-30.0), "k3")
    assert kl.item() == pytest.approx(29.0, rel=1e-12)
    assert gradient(kl, new) == pytest.approx([1.0], rel=1e-12)


def test_k3_of_a_small_difference_is_not_lost_in_float32() -> None:
    """d = 1e-3: 5.001667e-7, where exp(d) - 1 - d in float32 is off by a tenth."""
    kl = kl_estimate(torch.zeros(1), torch.tensor([1e-3]), "k3").item()
    assert kl == pytest.approx(5.001667e-7, rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_nan_is_passed_on_in_value_and_gradient(kind: KLEstimator) -> None:
    new = f64(math.nan).requires_grad_()
    kl = kl_estimate(new, f64(0.0), kind)
    assert math.isnan(kl.item())
    if kind != "k1":  # linear: its gradient is 1 anywhere
        assert math.isnan(gradient(kl, new)[0])


# Sequences


def test_the_sequence_ratio_is_the_geometric_mean_of_its_trained_tokens() -> None:
    """Log-ratios 0.1 and 0.3 beside a masked 9: exp(0.2), spread, each trained token with half of the gradient."""
    new = f64(0.1, 9.0, 0.3, -0.4).requires_grad_()
    mask, lengths = torch.tensor([True, False, True, True]), torch.tensor([3, 1])
    ratio = sequence_ratio(new, f64(0, 0, 0, 0), mask, lengths)
    assert ratio.tolist() == pytest.approx([math.exp(0.2)] * 3 + [math.exp(-0.4)], rel=1e-12)
    losses = clipped_surrogate(ratio, f64(1, 1, 1, -1), 0.5, 0.5)
    loss = weighted_sum(losses, token_weights(mask, lengths, "seq-mean-token-mean")) / 2
    assert loss.item() == pytest.approx((-math.exp(0.2) + math.exp(-0.4)) / 2, rel=1e-12)
    expected = [-math.exp(0.2) / 4, 0.0, -math.exp(0.2) / 4, math.exp(-0.4) / 2]
    assert gradient(loss, new) == pytest.approx(expected, rel=1e-12)


def test_a_sequence_without_trained_tokens_has_the_ratio_1_though_its_log_probs_are_nan() -> None:
    new = f64(math.nan, 0.5).requires_grad_()
    ratio = sequence_ratio(new, f64(0, 0), torch.tensor([False, True]), torch.tensor([1, 1]))
    assert ratio.tolist() == pytest.approx([1.0, math.exp(0.5)], rel=1e-12)
    assert gradient(ratio, new) == pytest.approx([0.0, math.exp(0.5)], rel=1e-12)


def test_a_nan_spoils_its_own_sequence_alone() -> None:
    mask, lengths = all_trained(2, 1)
    ratio = sequence_ratio(f64(math.nan, 0, 0), f64(0, 0, 0), mask, lengths)
    assert ratio.isnan().tolist() == [True, True, False]


# Policy losses


@pytest.mark.parametrize(("log_ratio", "pulls"), [(1.0, True), (2.0, False)])
def test_a_dual_clip_of_3_lets_go_of_a_bad_token_at_a_ratio_above_3(log_ratio: float, pulls: bool) -> None:
    new, ratio = f64(log_ratio).requires_grad_(), math.exp(log_ratio)
    losses = dual_clip(clipped_surrogate(bounded_ratio(new, f64(0)), f64(-2), 0.2, 0.2), f64(-2), 3.0)
    assert losses.item() == pytest.approx(2 * min(ratio, 3.0), rel=1e-12)
    assert gradient(losses, new) == pytest.approx([2 * ratio if pulls else 0.0], rel=1e-12)


def test_a_dual_clip_leaves_good_tokens_alone() -> None:
    assert dual_clip(f64(-9.0), f64(1.0), 3.0).item() == -9.0


@signs
@pytest.mark.parametrize(("log_ratio", "weight"), [(2.0, 1.5), (0.1, math.exp(0.1)), (-2.0, 0.5)])
def test_cispo_is_the_policy_gradient_with_a_bounded_detached_weight(
    advantage: float, log_ratio: float, weight: float
) -> None:
    new = f64(-1.0).requires_grad_()
    ratio = bounded_ratio(new, f64(-1.0 - log_ratio))
    losses = cispo(new, ratio, f64(advantage), cap=1.5, floor=0.5)
    assert losses.item() == pytest.approx(weight * advantage, rel=1e-12)
    assert gradient(losses, new) == pytest.approx([-weight * advantage], rel=1e-12)


@pytest.mark.parametrize(
    ("new", "old", "advantage", "dropped"),
    [
        (0.50, 0.30, 1.0, True),
        (0.30, 0.50, -1.0, True),
        (0.30, 0.50, 1.0, False),  # moves back
        (0.50, 0.30, -1.0, False),
        (0.40, 0.30, 1.0, False),  # near enough
        (0.04, 0.01, 1.0, False),  # four times as likely, and still near
        (0.50, 0.30, 0.0, False),
    ],
)
def test_dppo_drops_a_token_by_its_probability_not_by_its_ratio(
    new: float, old: float, advantage: float, dropped: bool
) -> None:
    """delta = 0.15."""
    log_probs = f64(math.log(new)).requires_grad_()
    losses, found = dppo(log_probs, f64(math.log(old)), f64(advantage), 0.15)
    expected = 0.0 if dropped else -advantage * new / old
    assert found.tolist() == [dropped]
    assert losses.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(losses, log_probs) == pytest.approx([expected], rel=1e-12)


@signs
def test_drpo_pulls_with_the_advantage_until_the_probability_has_moved_by_epsilon_and_then_back(
    advantage: float,
) -> None:
    """The gradient is `-A r + |A| pi_old r (r - 1) / epsilon`: 0 where pi has moved by epsilon with A."""
    old, epsilon = 0.4, 0.1
    for shift in (-0.2, -0.1, 0.0, 0.05, 0.1, 0.2):
        new = f64(math.log(old + shift)).requires_grad_()
        losses = drpo(new, f64(math.log(old)), f64(advantage), epsilon)
        ratio = (old + shift) / old
        expected = -advantage * ratio + abs(advantage) * ratio * shift / epsilon
        assert gradient(losses, new) == pytest.approx([expected], rel=1e-9, abs=1e-12)
        assert losses.item() == pytest.approx(-advantage * ratio + abs(advantage) * shift**2 / old / 0.2, rel=1e-9)


@signs
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_no_loss_of_a_huge_log_ratio_overflows(advantage: float, log_ratio: float) -> None:
    old, advantages = torch.full((1,), -300.0), torch.tensor([advantage])
    new = (old + log_ratio).requires_grad_()
    ratio = bounded_ratio(new, old)
    mask, lengths = all_trained(1)
    losses = (
        clipped_surrogate(sequence_ratio(new, old, mask, lengths), advantages, 0.2, 0.2),
        dual_clip(clipped_surrogate(ratio, advantages, 0.2, 0.2), advantages, 3.0),
        cispo(new, ratio, advantages, cap=5.0),
        dppo(new, old, advantages, 0.15)[0],
        drpo(new, old, advantages, 0.1),
        kl_estimate(new, old, "k3"),
    )
    for loss in losses:
        assert loss.isfinite().all()
        assert math.isfinite(gradient(loss, new)[0])


def test_a_clipped_token_is_counted_whatever_its_shape() -> None:
    assert clipped_away(f64(1.3, 1.3, 0.7), f64(1, -1, -1), 0.2, 0.2).tolist() == [True, False, True]


# Rollouts of another engine


def test_importance_weights_truncate_or_mask_tokens_or_whole_sequences() -> None:
    """Ratios 2, 0.4 | 1.25, with a masked NaN: products 0.8 and 1.25."""
    old, rollout = f64(math.log(2), math.log(0.4), 0.0, math.log(1.25)), f64(0, 0, math.nan, 0)
    mask, lengths = torch.tensor([True, True, False, True]), torch.tensor([3, 1])

    def found(**bounds: float) -> list[list[float]]:
        return [
            importance_weights(old, rollout, mask, lengths, level=level, **bounds).tolist()
            for level in ("token", "sequence")
        ]

    assert found(cap=1.5) == [pytest.approx([1.5, 0.4, 0, 1.25]), pytest.approx([0.8, 0.8, 0, 1.25])]
    assert found(cap=1.5, floor=0.5) == [pytest.approx([0, 0, 0, 1.25]), pytest.approx([0.8, 0.8, 0, 1.25])]
    assert found(cap=1.2, floor=0.5) == [pytest.approx([0, 0, 0, 0]), pytest.approx([0.8, 0.8, 0, 0])]


def test_importance_weights_carry_no_gradient_and_hide_no_nan() -> None:
    mask, lengths = all_trained(2)
    old = f64(0, math.nan).requires_grad_()
    for floor in (None, 0.5):
        weights = importance_weights(old, f64(0, 0), mask, lengths, level="token", cap=2.0, floor=floor)
        assert not weights.requires_grad
        assert weights.isnan().tolist() == [False, True]


def test_equal_engines_weigh_exactly_1() -> None:
    mask, lengths = all_trained(2, 3)
    log_probs = torch.randn(5, generator=torch.Generator().manual_seed(0))
    for level in ("token", "sequence"):
        assert importance_weights(log_probs, log_probs, mask, lengths, level=level, cap=2.0).tolist() == [1.0] * 5


# Values and lengths


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [(0.1, 0.405, -0.9), (0.5, 0.32, 0.0), (-0.5, 1.125, -1.5), (3.0, 2.0, 2.0)],
)
def test_the_value_loss_lets_go_of_a_value_that_has_moved_far_towards_its_return(
    value: float, loss: float, slope: float
) -> None:
    """Old value 0, return 1, clip 0.2: at 0.5 the clipped 0.2 is the worse, 0.8^2 / 2, and has no gradient."""
    values = f64(value).requires_grad_()
    losses = value_loss(values, f64(0), f64(1), 0.2)
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert gradient(losses, values) == pytest.approx([slope], abs=1e-12)


def test_the_overlong_penalty_falls_from_0_to_minus_1_over_the_buffer() -> None:
    """max 20, buffer 4."""
    assert overlong_penalty(torch.tensor([0, 16, 17, 19, 20, 25]), 20, 4).tolist() == [0, 0, -0.25, -0.75, -1, -1]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"within 1..20 .* got {buffer}"):
        overlong_penalty(torch.tensor([1]), 20, buffer)
