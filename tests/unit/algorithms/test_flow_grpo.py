from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.tiny_policy import context, policy, rewarded, rollout, rows_of, train, trajectory
from unirl.algorithms.base import AlgorithmOutput, Needs, Progress
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.sample import Part
from unirl.types.steps import NoSteps

WHOLE = slice(None)


def shifted(part: Part, log_ratios: list[float]) -> Part:
    """`part` whose recorded pi_old differs from its policy by these log-ratios, row by row."""
    segment = trajectory(part)
    old = segment.log_probs - torch.tensor(log_ratios)[:, None]
    return dataclasses.replace(part, segment=dataclasses.replace(segment, log_probs=old))


def loss(backend: FSDPBackend, algorithm: FlowGRPO, part: Part, progress: Progress | None = None) -> AlgorithmOutput:
    own = context(backend) if progress is None else context(backend, progress=progress)
    return algorithm.loss(own, part, WHOLE, algorithm.anchors(own, part, WHOLE))


@pytest.fixture(scope="module")
def backend() -> FSDPBackend:
    return policy(reference=True)


@pytest.fixture(scope="module")
def part(backend: FSDPBackend) -> Part:
    return rewarded(rollout(backend), [0.0, 2.0, 4.0, 2.0])  # advantages -1, 1, 1, -1


def test_every_sample_and_stochastic_step_has_a_term(backend: FSDPBackend, part: Part) -> None:
    algorithm = FlowGRPO(kl_coef=0.0)
    assert algorithm.columns(part) == 3
    assert loss(backend, algorithm, part).losses.shape == (4, 3)


def test_the_clip_acts_on_each_sample_by_its_advantage(backend: FSDPBackend, part: Part) -> None:
    """Ratios e^0.5 and e^-0.5 at a range of 0.1: the outer ones are clipped where they have moved with A."""
    output = loss(backend, FlowGRPO(clip_low=0.1, clip_high=0.1, kl_coef=0.0), shifted(part, [0.5, 0.5, -0.5, -0.5]))
    expected = torch.tensor([math.exp(0.5), -1.1, -math.exp(-0.5), 0.9])
    torch.testing.assert_close(output.losses, expected[:, None].expand(4, 3), rtol=1e-5, atol=0)
    assert output.means["train/clip_fraction"].tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert output.maxima["train/ratio_deviation"].max().item() == pytest.approx(math.exp(0.5) - 1, rel=1e-5)


def test_a_clipped_row_has_no_gradient(backend: FSDPBackend, part: Part) -> None:
    algorithm = FlowGRPO(clip_low=0.1, clip_high=0.1, kl_coef=0.0)
    losses = loss(backend, algorithm, shifted(part, [0.5, 0.5, -0.5, -0.5])).losses
    words = backend.stage.bundle.transformer.get_parameter("words.weight")
    norms = [float(torch.autograd.grad(row.sum(), words, retain_graph=True)[0].norm()) for row in losses]
    assert [norm > 0 for norm in norms] == [True, False, True, False]


def test_the_range_moves_linearly_to_its_end(backend: FSDPBackend, part: Part) -> None:
    algorithm = FlowGRPO(clip_low=0.1, clip_high=0.2, clip_end=0.5, kl_coef=0.0)
    moved = shifted(part, [-1.0, 1.0, 1.0, -1.0])
    for step, factor in ((0, 1.0), (5, 0.75), (10, 0.5)):
        losses = loss(backend, algorithm, moved, Progress(step, 10)).losses[:, 0]
        expected = torch.tensor([1 - 0.1 * factor, -(1 + 0.2 * factor), -(1 + 0.2 * factor), 1 - 0.1 * factor])
        torch.testing.assert_close(losses.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bound", "largest"), [(5.0, 5.0), (0.5, 0.5), (None, 9.0)])
def test_advantages_are_bounded_on_both_sides(backend: FSDPBackend, bound: float | None, largest: float) -> None:
    part = rewarded(rollout(backend), [0.0, 18.0, 0.0, 0.0])  # advantages -9, 9, 0, 0
    losses = loss(backend, FlowGRPO(kl_coef=0.0, advantage_clip=bound), part).losses[:, 0]
    torch.testing.assert_close(losses.detach(), torch.tensor([largest, -largest, 0.0, 0.0]), rtol=1e-5, atol=0)


def test_the_kl_enters_with_its_weight_and_the_authors_form_leaves_the_step_out_of_the_variance() -> None:
    """Four equal steps: -dt = 1/4, so `kl_flow_grpo = kl_gaussian / 4`."""
    backend = policy(reference=True)
    for number in range(2):
        train(backend, FlowGRPO(kl_coef=0.0), rewarded(rollout(backend, number=number)))
    part = rewarded(rollout(backend, number=2))
    plain = loss(backend, FlowGRPO(kl_coef=0.0), part).losses
    gaussian = loss(backend, FlowGRPO(kl_coef=10.0), part)
    authors = loss(backend, FlowGRPO(kl_coef=10.0, kl="flow_grpo"), part)
    assert float(gaussian.means["train/kl"].min()) > 1e-6
    torch.testing.assert_close(gaussian.losses - plain, 10.0 * gaussian.means["train/kl"], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(authors.means["train/kl"], gaussian.means["train/kl"] / 4, rtol=1e-5, atol=0)


def test_it_asks_for_a_reference_only_where_the_kl_counts() -> None:
    assert FlowGRPO(kl_coef=0.04).needs == Needs(ema_rollout=False, reference=True, trajectory=True)
    assert FlowGRPO(kl_coef=0.0).needs == Needs(ema_rollout=False, reference=False, trajectory=True)
    backend = policy(reference=False)
    train(backend, FlowGRPO(kl_coef=0.0), rewarded(rollout(backend)))


@pytest.mark.parametrize("sampling", [{"noise_level": 0.0}, {"sde": NoSteps()}])
def test_a_deterministic_rollout_is_refused_with_the_settings_that_help(
    backend: FSDPBackend, sampling: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"no stochastic step; set sampling.noise_level above 0 and a step rule"):
        FlowGRPO().columns(rollout(backend, **sampling))


def test_rows_without_a_trajectory_or_advantages_are_our_mistake(backend: FSDPBackend) -> None:
    with pytest.raises(AssertionError, match="recorded trajectories"):
        FlowGRPO().columns(rows_of([1.0]))
    with pytest.raises(AssertionError, match="advantages come before training"):
        loss(backend, FlowGRPO(kl_coef=0.0), rollout(backend))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_low": 0.0}, r"clip_low must be in \(0, 1\) and clip_high positive, got 0.0 and"),
        ({"clip_low": 1.0}, r"clip_low must be in \(0, 1\)"),
        ({"clip_high": 0.0}, "clip_high positive, got 0.0001 and 0.0"),
        ({"kl_coef": -0.1}, "kl_coef must not be negative, got -0.1"),
        ({"clip_end": 0.0}, "clip_end must be positive, got 0.0"),
        ({"advantage_clip": 0.0}, "advantage_clip must be positive or null, got 0.0"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FlowGRPO(**settings)
