"""pi / pi_old: exactly 1 at unchanged weights, frozen over all updates on a rollout, never hiding a NaN."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch

from tests.tiny_policy import (
    SMALL,
    gradient_of,
    last_gradient,
    policy,
    relative_difference,
    rewarded,
    rollout,
    train,
    trajectory,
    weights_of,
)
from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.models.base import Bundle
from unirl.models.tiny import TinySD3
from unirl.sde.steps import Step
from unirl.train.optim import AdamW
from unirl.train.stack.planner import Batch, DiffusionGeometry, plan
from unirl.types.condition import Embedding
from unirl.types.metric import values
from unirl.types.sample import Part

REWARDS = (0.0, 1.0, 2.0, 3.0, 5.0, 3.0, 1.0, 2.0)
GEOMETRIES: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 2, "replay_batch": 2},
    {"micro_batch_size": 3},
]
MOTIONLESS = AdamW(lr=1e-30)
RATIO_ALGORITHMS: dict[str, DiffusionAlgorithm] = {
    "grpo": FlowGRPO(kl_coef=0.0, anchor="replay"),
    "dppo": FlowDPPO(),
}


@dataclasses.dataclass(frozen=True)
class CountsItsBatch(TinySD3):
    """SMALL whose output has other low bits in a batch of another size, as big matrix products do."""

    layers: int = SMALL.layers
    heads: int = SMALL.heads
    head_dim: int = SMALL.head_dim
    embedding_dim: int = SMALL.embedding_dim

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return TinySD3.predict(self, bundle, latents, step, embedding, guidance) + 1e-3 * len(latents)


def with_log_probs(part: Part, log_probs: torch.Tensor) -> Part:
    return dataclasses.replace(part, segment=dataclasses.replace(trajectory(part), log_probs=log_probs))


def older(part: Part) -> Part:
    """`part` as made by earlier weights: pi_old is then replayed before the updates, not taken from the first one."""
    assert part.version is not None
    return dataclasses.replace(part, version=part.version - 1)


# Ratio 1


@pytest.mark.parametrize("name", RATIO_ALGORITHMS)
@pytest.mark.parametrize("guidance", [{}, {"guidance": 4.5}])
@pytest.mark.parametrize("guidance_gradient", [True, False])
@pytest.mark.parametrize("of_these_weights", [True, False])
def test_a_model_that_feels_its_batch_size_has_ratio_1_in_micro_batches_of_any_size(
    name: str, guidance: dict[str, Any], guidance_gradient: bool, of_these_weights: bool
) -> None:
    """Two updates at a learning rate that moves nothing; micro-batches of 3 leave a last one of 1 row."""
    for geometry in GEOMETRIES:
        backend = policy(CountsItsBatch(), optimizer=MOTIONLESS, guidance_gradient=guidance_gradient)
        part = rewarded(rollout(backend, group=4, **guidance), REWARDS)
        given = part if of_these_weights else older(part)
        report = values(train(backend, RATIO_ALGORITHMS[name], given, num_updates_per_batch=2, **geometry))
        assert report["train/ratio_deviation"] == 0.0
        assert report["train/clip_fraction"] == 0.0


def test_log_probs_of_the_rollout_are_no_anchor_for_such_a_model() -> None:
    backend = policy(CountsItsBatch(), optimizer=MOTIONLESS)
    part = rewarded(rollout(backend, group=4), REWARDS)
    report = values(train(backend, FlowGRPO(kl_coef=0.0, anchor="rollout"), part, micro_batch_size=1))
    assert report["train/ratio_deviation"] > 1e-4
    assert report["train/clip_fraction"] > 0.0


@pytest.mark.parametrize("geometry", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3, "replay_batch": 2}])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_log_probs_of_the_rollout_give_ratio_1_in_float32_and_replayed_ones_in_any_dtype(
    geometry: dict[str, Any], compute_dtype: str
) -> None:
    anchors: tuple[Literal["rollout", "replay"], ...] = ("rollout", "replay")
    for anchor in anchors:
        backend = policy(compute_dtype=compute_dtype)
        part = rewarded(rollout(backend, group=4), REWARDS)
        algorithm = FlowGRPO(kl_coef=0.0, anchor=anchor)
        found = values(train(backend, algorithm, part, **geometry))["train/first_ratio_deviation"]
        assert found <= {"replay": 0.0, "rollout": 2e-6 if compute_dtype == "float32" else 2e-2}[anchor]


@pytest.mark.parametrize("anchor", ["rollout", "replay"])
@pytest.mark.parametrize("of_these_weights", [True, False])
def test_at_ratio_1_the_gradient_is_the_plain_policy_gradient(
    anchor: Literal["rollout", "replay"], of_these_weights: bool
) -> None:
    """-mean A grad log pi over samples and steps."""
    backend = policy()
    part = rewarded(rollout(backend, group=4), REWARDS)
    assert part.advantages is not None
    log_probs = backend.stage.replay(part, trajectory(part).sde_indices).log_probs
    expected = gradient_of(backend, -(part.advantages[:, None] * log_probs).mean())
    algorithm = FlowGRPO(kl_coef=0.0, anchor=anchor)
    train(backend, algorithm, part if of_these_weights else older(part))
    assert relative_difference(last_gradient(backend), expected) < 1e-6


# Two updates


@pytest.mark.parametrize("anchor", ["rollout", "replay"])
@pytest.mark.parametrize("of_these_weights", [True, False])
def test_over_two_updates_pi_old_stands_still_and_the_ratio_leaves_1(
    anchor: Literal["rollout", "replay"], of_these_weights: bool
) -> None:
    """What the second update reports is measured here against the log-probs of the rollout."""
    backend = policy()
    algorithm, geometry = FlowGRPO(kl_coef=0.0, anchor=anchor), DiffusionGeometry(num_updates_per_batch=2)
    part = rewarded(rollout(backend, group=4), REWARDS)
    given = part if of_these_weights else older(part)
    recorded = trajectory(part).log_probs.clone()
    report = values(train(backend, algorithm, given, num_updates_per_batch=2))
    assert torch.equal(trajectory(part).log_probs, recorded)
    assert report["train/first_ratio_deviation"] <= {"replay": 0.0, "rollout": 2e-6}[anchor]
    # The same first update alone; its rows are those that the plan puts there.
    (first,), (second,) = plan(Batch.of(given, 0, ranks=1), geometry)
    alone = policy()
    train(alone, algorithm, first)
    steps = trajectory(second).sde_indices
    ratio = (alone.stage.replay(second, steps).log_probs - trajectory(second).log_probs).exp()
    expected = float((ratio.detach() - 1).abs().max())
    assert expected > 1e-3
    assert report["train/ratio_deviation"] == pytest.approx(expected, rel=1e-3)


def test_clipping_sets_in_with_the_second_update() -> None:
    backend = policy()
    part = rewarded(rollout(backend, group=4), REWARDS)
    one = values(train(policy(), FlowGRPO(kl_coef=0.0), part))
    two = values(train(backend, FlowGRPO(kl_coef=0.0), part, num_updates_per_batch=2))
    assert one["train/clip_fraction"] == 0.0
    assert 0.0 < two["train/clip_fraction"] <= 0.5


# Overflow and NaN


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("name", ["grpo", "dppo"])
def test_a_log_ratio_of_200_trains_on_with_finite_weights(name: str, log_ratio: float) -> None:
    algorithm: Any = {"grpo": FlowGRPO(kl_coef=0.0), "dppo": FlowDPPO(anchor="rollout")}[name]
    backend = policy()
    part = rewarded(rollout(backend), REWARDS[:4])
    far = with_log_probs(part, trajectory(part).log_probs - torch.tensor([log_ratio, 0.0, 0.0, 0.0])[:, None])
    report = values(train(backend, algorithm, far))
    assert report["train/skipped"] == 0.0
    assert math.isfinite(report["train/loss"])
    assert all(bool(torch.isfinite(value).all()) for value in weights_of(backend).values())


@pytest.mark.parametrize("name", ["grpo", "dppo"])
@pytest.mark.parametrize("micro", [None, 1])
def test_a_recorded_log_prob_that_is_nan_refuses_the_step_and_says_so(name: str, micro: int | None) -> None:
    algorithm: Any = {"grpo": FlowGRPO(kl_coef=0.0), "dppo": FlowDPPO(anchor="rollout")}[name]
    backend = policy()
    part = rewarded(rollout(backend), REWARDS[:4])
    broken = trajectory(part).log_probs.clone()
    broken[2, 1] = math.nan
    before = weights_of(backend)
    report = values(train(backend, algorithm, with_log_probs(part, broken), micro_batch_size=micro))
    assert report["train/skipped"] == 1.0
    assert math.isnan(report["train/loss"])
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
    with pytest.raises(FloatingPointError, match=r"\(max_skipped_steps=0\)"):
        train(policy(max_skipped_steps=0), algorithm, with_log_probs(part, broken))
