"""The backend's weights: what trains, how a step is taken or skipped, other weights in their place."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from tests.tiny_policy import (
    PLAIN,
    Slope,
    last_gradient,
    policy,
    rewarded,
    rollout,
    rows_of,
    train,
    trajectory,
    weights_of,
)
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.rollout.trainside import Trainside
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.types.metric import values
from unirl.types.sample import Part

ADAPTER = LoRA(rank=2, alpha=4)
GRPO = FlowGRPO(kl_coef=0.0)
BAD = rows_of([math.inf])
CONSTANT = EMA(0.75, warmup="constant")


def all_weights(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.stage.bundle.transformer.state_dict().items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in after.items() if not torch.equal(before[name], value)}


def final(part: Part) -> torch.Tensor:
    return trajectory(part).final


def mean_shift(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """How far the weights went on average; under Slope they all go the same way."""
    moved = torch.cat([(after[name] - before[name]).flatten().double() for name in before])
    torch.testing.assert_close(moved, moved.mean().expand_as(moved), rtol=1e-3, atol=3e-7)
    return float(moved.mean())


# What trains


@pytest.mark.parametrize("lora", [None, ADAPTER])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_masters_shadows_and_moments_are_float32_whatever_the_compute_dtype(
    lora: LoRA | None, compute_dtype: str
) -> None:
    backend = policy(lora=lora, compute_dtype=compute_dtype, ema=EMA())
    train(backend, GRPO, rewarded(rollout(backend)))
    state = backend.state()
    moments = [m for entries in state["optimizer"].values() for m in entries.values()]
    assert len(moments) == 3 * len(state["parameters"])
    for tensor in [*state["parameters"].values(), *state["ema"].values(), *moments]:
        assert tensor.dtype == torch.float32
    frozen = {p.dtype for p in backend.stage.bundle.transformer.parameters() if not p.requires_grad}
    assert frozen == (set() if lora is None else {getattr(torch, compute_dtype)})


def test_a_thousand_steps_of_a_thousandth_add_up_to_one_under_bfloat16() -> None:
    """A weight kept in bfloat16 would not move at all."""
    backend = policy(compute_dtype="bfloat16", total_steps=1000)
    before = weights_of(backend)
    for _ in range(1000):
        train(backend, Slope(), rows_of([1.0]))
    after = weights_of(backend)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value - 1.0, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_the_optimizer_holds_exactly_what_requires_a_gradient_and_nothing_else_moves(lora: LoRA | None) -> None:
    backend = policy(lora=lora, reference=True, ema=EMA())
    named = dict(backend.stage.bundle.transformer.named_parameters())
    trainable = {name for name, parameter in named.items() if parameter.requires_grad}
    assert (len(trainable) < len(named)) == (lora is not None)
    before = all_weights(backend)
    for number in range(2):
        train(backend, FlowGRPO(kl_coef=0.1), rewarded(rollout(backend, number=number)))
    assert set(backend.state()["parameters"]) == set(backend.state()["optimizer"]) == trainable
    moved = changed(before, all_weights(backend))
    assert moved <= trainable
    # The last block drops its text stream, whose queries therefore have no gradient.
    assert all("add_q_proj" in name for name in trainable - moved)
    if lora is not None:
        assert all("lora_" in name for name in trainable)


def test_a_gradient_that_is_recomputed_is_the_same_gradient() -> None:
    gradients = []
    for recomputed in (False, True):
        backend = policy(gradient_checkpointing=recomputed)
        train(backend, GRPO, rewarded(rollout(backend)))
        gradients.append(last_gradient(backend))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


# Steps


def test_the_gradient_norm_is_reported_as_it_was_and_clipped_to_the_limit() -> None:
    """A gradient of 3 in each of n weights has the norm 3 sqrt(n)."""
    backend = policy(max_grad_norm=0.5)
    count = sum(value.numel() for value in weights_of(backend).values())
    report = values(train(backend, Slope(), rows_of([3.0])))
    assert report["train/grad_norm"] == pytest.approx(3 * count**0.5, rel=1e-6)
    assert float(last_gradient(backend).norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("limit", [None, 1e6])
def test_a_gradient_below_the_limit_is_left_alone(limit: float | None) -> None:
    backend = policy(max_grad_norm=limit)
    train(backend, Slope(), rows_of([3.0]))
    gradient = last_gradient(backend)
    assert torch.equal(gradient, torch.full_like(gradient, 3.0))


def test_each_step_goes_as_far_as_its_learning_rate_says() -> None:
    """Under a constant gradient AdamW moves every weight by the learning rate."""
    backend = policy(optimizer=AdamW(lr=1e-2, betas=(0.0, 0.999), schedule="linear"), total_steps=4)
    for expected in (1e-2, 0.75e-2, 0.5e-2, 0.25e-2):
        before = weights_of(backend)
        report = values(train(backend, Slope(), rows_of([1.0])))
        assert report["train/lr"] == pytest.approx(expected, rel=1e-9)
        assert mean_shift(before, weights_of(backend)) == pytest.approx(-expected, rel=1e-4)


def test_the_schedule_counts_optimizer_steps_not_rollouts() -> None:
    """After 50 rollouts of 2 updates, a cosine over 200 steps is at half."""
    backend = policy(optimizer=AdamW(lr=1.0, schedule="cosine"), total_steps=200)
    for _ in range(50):
        train(backend, Slope(), rows_of([1.0, 1.0]), num_updates_per_batch=2)
    assert backend.state()["steps"] == 100
    assert values(train(backend, Slope(), rows_of([1.0])))["train/lr"] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("unit", ["optimizer_step", "rollout"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    unit: Literal["optimizer_step", "rollout"], bad: float
) -> None:
    backend = policy(ema=EMA(0.5, warmup="constant", unit=unit), optimizer=AdamW(schedule="linear"), total_steps=4)
    train(backend, Slope(), rows_of([1.0]))
    before = {**backend.state(), "parameters": weights_of(backend)}
    shadow = {name: value.clone() for name, value in before["ema"].items()}
    report = train(backend, Slope(), rows_of([bad]))
    after = backend.state()
    assert changed(before["parameters"], after["parameters"]) == changed(shadow, after["ema"]) == set()
    counters = ("steps", "ema_updates", "version")
    assert [after[name] for name in counters] == [before[name] for name in counters] == [1, 1, 1]
    assert report["train/skipped"].value == 1.0
    assert math.isnan(values(report)["train/grad_norm"])
    assert after["skipped_in_row"] == 1


def test_the_step_after_a_skipped_one_is_the_step_of_a_run_without_it() -> None:
    runs = []
    for with_bad_step in (False, True):
        backend = policy(optimizer=AdamW(schedule="cosine"), ema=EMA(), total_steps=8)
        train(backend, Slope(), rows_of([1.0]))
        if with_bad_step:
            train(backend, Slope(), BAD)
        report = values(train(backend, Slope(), rows_of([-2.0])))
        runs.append((report, backend.state()))
    (report, state), (report_after_skip, state_after_skip) = runs
    assert report_after_skip == report
    for part in ("parameters", "ema"):
        assert changed(state[part], state_after_skip[part]) == set()
    assert state_after_skip["skipped_in_row"] == 0


def test_more_bad_gradients_in_a_row_than_allowed_stop_the_run_with_the_numbers() -> None:
    backend = policy(max_skipped_steps=2)
    for _ in range(2):
        train(backend, Slope(), BAD)
    train(backend, Slope(), rows_of([1.0]))  # a good step starts the count anew
    for _ in range(2):
        train(backend, Slope(), BAD)
    with pytest.raises(FloatingPointError, match=r"not finite 3 times in a row \(max_skipped_steps=2\)"):
        train(backend, Slope(), BAD)


def test_no_bad_gradient_is_allowed_where_none_may_be_skipped() -> None:
    with pytest.raises(FloatingPointError, match=r"not finite 1 times in a row \(max_skipped_steps=0\)"):
        train(policy(max_skipped_steps=0), Slope(), BAD)


# EMA


def test_the_shadow_follows_the_weights_by_its_decay() -> None:
    """Weights move by -lr a step: after two steps at d = 0.75 the shadow lags at 0.25 x -2 + 0.75 x (0.25 x -1)."""
    backend = policy(ema=CONSTANT)
    before = weights_of(backend)
    for _ in range(2):
        train(backend, Slope(), rows_of([1.0]))
    assert mean_shift(before, backend.state()["ema"]) / PLAIN.lr == pytest.approx(-0.6875, rel=1e-3)


def test_an_ema_by_rollout_moves_once_after_all_its_updates() -> None:
    """Two updates move the weights by -2 lr, of which the shadow takes a quarter."""
    backend = policy(ema=EMA(0.75, warmup="constant", unit="rollout"))
    before = weights_of(backend)
    train(backend, Slope(), rows_of([1.0, 1.0]), num_updates_per_batch=2)
    assert mean_shift(before, backend.state()["ema"]) / PLAIN.lr == pytest.approx(-0.5, rel=1e-3)
    assert backend.state()["ema_updates"] == 1


def test_only_an_engine_that_is_told_to_samples_with_the_shadow() -> None:
    backend = policy(ema=CONSTANT)
    train(backend, GRPO, rewarded(rollout(backend)))
    live, shadow = (final(rollout(backend, engine=Trainside(weights=weights))) for weights in ("live", "ema"))
    assert not torch.equal(live, shadow)
    with backend.ema():
        assert torch.equal(final(rollout(backend)), shadow)
    assert torch.equal(final(rollout(backend)), live)


def test_live_weights_are_back_after_an_ema_rollout_that_fails() -> None:
    backend = policy(ema=EMA(0.9, warmup="constant"))
    train(backend, Slope(), rows_of([1.0]))
    before, shadow = weights_of(backend), {name: value.clone() for name, value in backend.state()["ema"].items()}
    assert changed(before, shadow) == set(before)
    with pytest.raises(ValueError, match=r"uses \['unicorn'\]"):
        rollout(backend, prompts=["unicorn"], engine=Trainside(weights="ema"))
    assert changed(before, weights_of(backend)) == changed(shadow, backend.state()["ema"]) == set()


# Reference


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_the_reference_is_the_initial_policy_and_leaves_the_present_one_as_it_is(lora: LoRA | None) -> None:
    backend = policy(lora=lora, reference=True)
    initial = final(rollout(backend))
    for number in range(2):
        train(backend, GRPO, rewarded(rollout(backend, number=number)))
    before = all_weights(backend)
    flags = [p.requires_grad for p in backend.stage.bundle.transformer.parameters()]
    with backend.reference():
        assert torch.equal(final(rollout(backend)), initial)
    assert not torch.equal(final(rollout(backend)), initial)
    with pytest.raises(RuntimeError, match="reference forward failed"), backend.reference():
        raise RuntimeError("reference forward failed")
    assert changed(before, all_weights(backend)) == set()
    assert [p.requires_grad for p in backend.stage.bundle.transformer.parameters()] == flags


@pytest.mark.parametrize("lora", [None, ADAPTER])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kl", ["gaussian", "flow_grpo"])
def test_the_kl_to_the_reference_is_exactly_0_at_the_start_and_positive_after_an_update(
    lora: LoRA | None, compute_dtype: str, kl: Literal["gaussian", "flow_grpo"]
) -> None:
    backend = policy(lora=lora, reference=True, compute_dtype=compute_dtype)
    algorithm = FlowGRPO(kl_coef=0.1, kl=kl)
    found = [
        train(backend, algorithm, rewarded(rollout(backend, number=number)))["train/kl"].value for number in range(3)
    ]
    assert found[0] == 0.0
    assert found[1] > 0
    assert found[2] > 0


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive or null, got 0.0"),
        ({"max_skipped_steps": -1}, "max_skipped_steps must not be negative, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DiffusionBackendConfig(**settings)
