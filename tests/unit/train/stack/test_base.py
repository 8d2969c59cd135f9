"""The stack: one denominator an optimizer step, reported as it was optimised; what is invalid leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.tiny_policy import PLAIN, SMALL, START, Slope, last_gradient, policy, rows_of, saved, train, weights_of
from unirl.distributed.group.placement import Placement
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry
from unirl.types.metric import values
from unirl.types.sample import Part

NAN = math.nan
GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 1},
    {"micro_batch_size": 2},
    {"micro_batch_size": 3},
    {"replay_batch": 1},
    {"micro_batch_size": 1, "replay_batch": 2},
]


def gradient_of_each_weight(part: Part, **geometry: Any) -> float:
    """Slope gives every weight one and the same gradient: the mean of A over the rows of the step."""
    backend = policy()
    train(backend, Slope(steps=3), part, **geometry)
    gradient = last_gradient(backend)
    torch.testing.assert_close(gradient, gradient[0].expand_as(gradient), rtol=1e-6, atol=0)
    return float(gradient[0])


# Denominator


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_losses_of_2_and_4_are_reported_and_optimised_as_3(geometry: dict[str, Any]) -> None:
    """A sum over micro-batches would report 6, a mean scaled twice 1.5."""
    part = rows_of([2.0, 4.0])
    assert values(train(policy(), Slope(steps=3), part, **geometry))["train/loss"] == 3.0
    assert gradient_of_each_weight(part, **geometry) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_invalid_rows_are_in_no_denominator(geometry: dict[str, Any]) -> None:
    """Rows 1 and 4 of 7 are valid; micro-batches of 1, 2 and 3 rows are thus uneven or empty."""
    advantages = [100.0, 2.0, -50.0, 7.0, 6.0, NAN, 1e30]
    part = rows_of(advantages, [NAN, 0.0, NAN, math.inf, 0.0, NAN, -math.inf])
    assert values(train(policy(), Slope(steps=3), part, **geometry))["train/loss"] == 4.0
    assert gradient_of_each_weight(part, **geometry) == pytest.approx(4.0, rel=1e-6)


def test_each_update_has_its_own_denominator() -> None:
    """One update of 1 valid row and one of 2: each gradient is the mean over its own rows."""
    part = rows_of([3.0] * 4, [0.0, 0.0, 0.0, NAN])
    backend = policy()
    train(backend, Slope(), part, num_updates_per_batch=2)
    assert backend.state()["steps"] == 2
    gradient = last_gradient(backend)
    assert torch.equal(gradient, torch.full_like(gradient, 3.0))


def test_the_order_of_rows_does_not_matter() -> None:
    part = rows_of([1.0, -2.0, 4.0, 0.5, 9.0, -3.0])
    turned = part.select([5, 3, 1, 0, 2, 4])
    assert gradient_of_each_weight(part) == pytest.approx(gradient_of_each_weight(turned), rel=1e-6)


# Nothing to train on


def test_a_rollout_without_a_valid_row_takes_no_step_and_says_so() -> None:
    backend = policy(ema=EMA(0.5, unit="rollout"))
    before = saved(backend)
    report = values(train(backend, Slope(), rows_of([1.0] * 4, [NAN] * 4), num_updates_per_batch=2))
    after = backend.state()
    assert report == {"train/empty_updates": 2.0}
    assert all(torch.equal(after["parameters"][name], value) for name, value in before["parameters"].items())
    assert all(torch.equal(after["ema"][name], value) for name, value in before["ema"].items())
    counters = ("steps", "ema_updates", "skipped_in_row", "version")
    assert [after[name] for name in counters] == [before[name] for name in counters] == [0, 0, 0, 0]


def test_an_update_without_a_valid_row_leaves_the_others_alone() -> None:
    valid = rows_of([3.0] * 8, [0.0] + [NAN] * 7)
    backend = policy()
    report = values(train(backend, Slope(), valid, num_updates_per_batch=4))
    assert report["train/empty_updates"] == 3.0
    assert report["train/loss"] == 3.0
    assert backend.state()["steps"] == backend.state()["version"] == 1
    assert all(bool(torch.isfinite(value).all()) for value in weights_of(backend).values())


def test_bad_gradients_are_counted_over_the_updates_of_a_rollout() -> None:
    backend = policy()
    report = values(train(backend, Slope(), rows_of([math.inf] * 4), num_updates_per_batch=4))
    assert report["train/skipped"] == 4.0
    assert backend.state()["skipped_in_row"] == 4
    assert backend.state()["version"] == 0


def test_a_rollout_of_one_good_and_one_bad_update_makes_a_new_version() -> None:
    backend = policy(ema=EMA(0.5, unit="rollout"))
    train(backend, Slope(), rows_of([1.0, math.inf]), num_updates_per_batch=2)
    state = backend.state()
    assert (state["steps"], state["version"], state["ema_updates"]) == (1, 1, 1)


# Through a slab


def test_through_a_slab_it_is_the_same_update() -> None:
    part, geometry = rows_of([1.0, -2.0, 4.0, 0.5]), DiffusionGeometry(num_updates_per_batch=2, micro_batch_size=1)
    alone = policy()
    expected = TrainStack(alone, Slope(), geometry).train(Batch.of(part, 0, ranks=1), START)
    config = DiffusionBackendConfig(optimizer=PLAIN, max_grad_norm=None)
    with Placement(device="cpu").slab() as slab:
        backend = slab.spawn(
            FSDPBackend, SMALL, config, device=torch.device("cpu"), seed=0, total_steps=100, with_reference=False
        )
        stack = slab.spawn(TrainStack, backend, Slope(), geometry)
        assert stack.train(Batch.of(part, 0, ranks=1), START) == expected
        state = backend.state()
    assert all(torch.equal(value, state["parameters"][name]) for name, value in weights_of(alone).items())
