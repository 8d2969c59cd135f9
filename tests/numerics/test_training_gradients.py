"""The gradient of an optimizer step belongs to its rows: no cut, no order and no invalid row changes it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.tiny_policy import context, last_gradient, policy, relative_difference, rewarded, rollout, train
from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.types.metric import values
from unirl.types.sample import Part

# float32 sums in another order.
TOLERANCE = 1e-6
REWARDS = (0.0, 1.0, 2.0, 3.0, 5.0, 3.0, 1.0, 2.0)
ALGORITHMS: dict[str, DiffusionAlgorithm] = {
    "grpo": FlowGRPO(clip_low=0.5, clip_high=0.5, kl_coef=10.0),
    "grpo_replay": FlowGRPO(clip_low=0.5, clip_high=0.5, kl_coef=10.0, kl="flow_grpo", anchor="replay"),
    "dppo": FlowDPPO(kl_threshold=1.0),
    "nft": DiffusionNFT(kl_coef=1.0),
}
GEOMETRIES: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 2},
    {"micro_batch_size": 3},
    {"micro_batch_size": 4},
    {"replay_batch": 1},
    {"replay_batch": 2},
    {"micro_batch_size": 3, "replay_batch": 1},
]
everywhere = pytest.mark.parametrize("name", ALGORITHMS)


def moved_policy() -> FSDPBackend:
    """A policy that has left its reference and its shadow."""
    backend = policy(reference=True, ema=EMA(0.9, warmup="constant"))
    train(backend, FlowGRPO(kl_coef=0.0), rewarded(rollout(backend)))
    return backend


def batch(backend: FSDPBackend, rewards: tuple[float, ...] = REWARDS) -> Part:
    return rewarded(rollout(backend, number=1, group=4), rewards, scale="group_std")


def step(
    name: str, rewards: tuple[float, ...] = REWARDS, rows: list[int] | None = None, **geometry: Any
) -> tuple[torch.Tensor, float]:
    """The gradient and the reported loss of one update on `rows` (all) of the batch."""
    backend = moved_policy()
    part = batch(backend, rewards)
    report = values(train(backend, ALGORITHMS[name], part if rows is None else part.select(rows), **geometry))
    return last_gradient(backend), report["train/loss"]


@everywhere
def test_micro_batches_and_forwards_of_any_size_give_one_gradient_and_one_report(name: str) -> None:
    gradient, loss = step(name)
    assert float(gradient.norm()) > 1e-2
    for geometry in GEOMETRIES:
        other, other_loss = step(name, **geometry)
        assert relative_difference(other, gradient) < TOLERANCE, geometry
        assert other_loss == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE), geometry


@everywhere
def test_invalid_rows_leave_no_trace_in_any_cut(name: str) -> None:
    """Rows 1, 2 and 6 have no reward: the step is that of the other five alone, KL and denominator included."""
    rewards = tuple(math.nan if row in (1, 2, 6) else reward for row, reward in enumerate(REWARDS))
    gradient, loss = step(name, rewards, rows=[0, 3, 4, 5, 7])
    for geometry in ({}, *GEOMETRIES):
        other, other_loss = step(name, rewards, **geometry)
        assert relative_difference(other, gradient) < TOLERANCE, geometry
        assert other_loss == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE), geometry


@everywhere
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    gradient, loss = step(name)
    turned, turned_loss = step(name, rows=[7, 2, 5, 0, 3, 6, 1, 4])
    assert relative_difference(turned, gradient) < TOLERANCE
    assert turned_loss == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)


@everywhere
def test_the_reported_loss_is_the_optimised_one(name: str) -> None:
    """By central differences along the gradient: `L(w + h g) - L(w - h g) = 2 h |g|^2`."""
    backend, algorithm = moved_policy(), ALGORITHMS[name]
    if isinstance(algorithm, DiffusionNFT):
        # The adaptive weight is detached: what is reported then changes with it, what is optimised does not.
        algorithm = dataclasses.replace(algorithm, adaptive_weight=False)
    part, own = batch(backend), context(backend)
    anchors = algorithm.frozen_anchors(own, part)
    weights = [w for w in backend.stage.bundle.transformer.parameters() if w.requires_grad]

    def loss_at(distance: float, along: list[torch.Tensor]) -> float:
        for weight, direction in zip(weights, along, strict=True):
            weight.data += distance * direction
        report = algorithm.backward(own, part, anchors, terms=algorithm.terms(part))
        for weight, direction in zip(weights, along, strict=True):
            weight.data -= distance * direction
        return report["train/loss"].value

    loss_at(0.0, [torch.zeros_like(w) for w in weights])
    gradient = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights]
    square = sum(float(g.double().square().sum()) for g in gradient)
    h = 1e-3 / square**0.5
    assert loss_at(h, gradient) - loss_at(-h, gradient) == pytest.approx(2 * h * square, rel=0.01)
