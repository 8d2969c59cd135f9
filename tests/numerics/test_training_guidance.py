"""Guidance: one velocity in rollout, replay, reference and forward process; its shortcut changes no gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tiny_policy import (
    SMALL,
    context,
    last_gradient,
    policy,
    relative_difference,
    rewarded,
    rollout,
    train,
    trajectory,
)
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.models.base import Bundle, Point
from unirl.models.tiny import TinySD3
from unirl.sde.noise import initial_noise
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import FlowSDE
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.stack.planner import Batch, DiffusionGeometry, plan
from unirl.types.condition import Embedding
from unirl.types.metric import values
from unirl.types.sample import Part
from unirl.types.steps import NoSteps

REWARDS = (0.0, 1.0, 2.0, 3.0, 5.0, 3.0, 1.0, 2.0)
GRPO = FlowGRPO(kl_coef=0.0)
POISON = 100.0


@dataclasses.dataclass(frozen=True)
class OneAndAFifth(TinySD3):
    """Velocity 1 under a prompt and 0.2 under the empty one, whatever the latent."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        prompted = (embedding.tokens != 0).any(1)
        velocity = torch.where(prompted, 1.0, 0.2)[:, None, None, None].expand(latents.shape)
        return velocity + 0 * bundle.transformer.get_parameter("words.weight").sum()


@dataclasses.dataclass(frozen=True)
class DetachedGuidance(TinySD3):
    """SMALL that cuts the graph of the unconditional branch by itself."""

    layers: int = SMALL.layers
    heads: int = SMALL.heads
    head_dim: int = SMALL.head_dim
    embedding_dim: int = SMALL.embedding_dim

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return TinySD3.guide(self, conditional, unconditional.detach(), at)


def recorded(part: Part) -> torch.Tensor:
    found = trajectory(part).unconditional
    assert found is not None
    return found


def with_unconditional(part: Part, value: torch.Tensor | None) -> Part:
    return dataclasses.replace(part, segment=dataclasses.replace(trajectory(part), unconditional=value))


def guided_batch(backend: FSDPBackend, **sampling: Any) -> Part:
    return rewarded(rollout(backend, group=4, guidance=4.5, **sampling), REWARDS)


# One velocity everywhere


@pytest.mark.parametrize(("guidance", "velocity"), [(4.5, 3.8), (1.0, 1.0), (2.0, 1.8)])
@pytest.mark.parametrize("guidance_gradient", [True, False])
def test_1_and_a_fifth_make_3_8_in_rollout_replay_reference_and_forward_process(
    guidance: float, velocity: float, guidance_gradient: bool
) -> None:
    """v = v_u + g (v_c - v_u). The ODE from sigma 1 to 0 moves by -v."""
    backend = policy(OneAndAFifth(), reference=True, guidance_gradient=guidance_gradient)
    ode = rollout(backend, guidance=guidance, sde=NoSteps())
    start = initial_noise(ode.ids, (1, 8, 8), seed=3)
    torch.testing.assert_close(trajectory(ode).final, start - velocity, rtol=0, atol=1e-5)

    part = rollout(backend, guidance=guidance)
    segment = trajectory(part)
    steps = segment.sde_indices
    schedule = Schedule(segment.sigmas, segment.times)
    expected = torch.stack(
        [
            FlowSDE(0.7).mean(x := segment.at(s[None])[:, 0], torch.full_like(x, velocity), schedule.at(s.repeat(4)))
            for s in steps
        ],
        dim=1,
    )
    for unchanged in (True, False):
        replay = backend.stage.replay(part, steps, unchanged=unchanged)
        torch.testing.assert_close(replay.means, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(replay.log_probs, segment.log_probs, rtol=0, atol=1e-5)
    with backend.reference():
        torch.testing.assert_close(backend.stage.replay(part, steps).means, expected, rtol=0, atol=1e-5)

    level = torch.full((4, 2), 0.5)
    points = torch.randn(4, 2, 1, 8, 8)
    found = backend.stage.velocity(part.guidance_branches, points, sigma=level, time=1000 * level, guidance=guidance)
    torch.testing.assert_close(found, torch.full_like(points, velocity), rtol=0, atol=1e-6)


def test_the_forward_process_of_nft_uses_the_guidance_of_the_rollout() -> None:
    """x0(v) = x_t - sigma v: with v = 3.8 the error |x0(v) - x0|^2 is sigma^2 |3.8 - (eps - x0)|^2."""
    backend = policy(OneAndAFifth(), ema=EMA())
    part = rewarded(rollout(backend, guidance=4.5, sde=NoSteps(), noise_level=0.0), REWARDS[:4])
    algorithm = DiffusionNFT(kl_coef=0.0, adaptive_weight=False)
    index, noise = algorithm._draws(part, slice(None), trajectory(part).final)
    sigma = trajectory(part).sigmas[index]
    clean = trajectory(part).final[:, None]
    errors = (sigma[..., None, None, None] * (3.8 - (noise - clean))).square().flatten(2).mean(2)
    losses = algorithm.loss(context(backend), part, slice(None), None).losses
    torch.testing.assert_close(losses, 5.0 * errors, rtol=1e-5, atol=0)


def test_without_guidance_no_unconditional_velocity_is_asked_for_or_kept() -> None:
    backend = policy(guidance_gradient=False)
    part = rollout(backend, guidance=1.0)
    assert part.guidance_branches.negative is None
    assert trajectory(part).unconditional is None


# The shortcut of unchanged weights


def gradient(
    part_of: Any, *, lora: LoRA | None = None, compute_dtype: str = "float32", **geometry: Any
) -> torch.Tensor:
    backend = policy(guidance_gradient=False, lora=lora, compute_dtype=compute_dtype)
    if lora is not None:
        # B = 0 would leave A without a gradient.
        for name, value in backend.state()["parameters"].items():
            value.copy_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
    train(backend, GRPO, part_of(guided_batch(backend)), **geometry)
    return last_gradient(backend)


def kept(part: Part) -> Part:
    assert recorded(part).shape == (8, 3, 1, 8, 8)
    return part


def forgotten(part: Part) -> Part:
    return with_unconditional(part, None)


def of_earlier_weights(part: Part) -> Part:
    assert part.version is not None
    return dataclasses.replace(part, version=part.version - 1)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
@pytest.mark.parametrize("geometry", [{}, {"micro_batch_size": 3, "replay_batch": 1}])
def test_the_recorded_unconditional_velocity_changes_no_gradient(lora: LoRA | None, geometry: dict[str, Any]) -> None:
    with_it, without = (gradient(change, lora=lora, **geometry) for change in (kept, forgotten))
    assert float(with_it.norm()) > 1e-3
    assert relative_difference(with_it, without) < 1e-6


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_under_bfloat16_the_branch_without_a_graph_takes_no_gradient_from_the_other(lora: LoRA | None) -> None:
    """Autocast caches casts of weights; one cached without a graph would cut the conditional branch off."""
    with_it, without = (gradient(change, lora=lora, compute_dtype="bfloat16") for change in (kept, forgotten))
    exact = gradient(kept, lora=lora)
    assert relative_difference(with_it, without) < 0.05
    assert relative_difference(with_it, exact) < 0.1


def test_the_gradient_is_the_full_one_with_the_unconditional_branch_detached() -> None:
    detached, full = policy(DetachedGuidance()), policy()
    for backend in (detached, full):
        train(backend, GRPO, guided_batch(backend))
    found = gradient(kept)
    assert relative_difference(found, last_gradient(detached)) < 1e-6
    assert relative_difference(found, last_gradient(full)) > 0.1


def test_it_is_used_in_the_first_update_on_samples_of_these_weights() -> None:
    poisoned = gradient(lambda part: with_unconditional(part, recorded(part) + POISON))
    assert relative_difference(poisoned, gradient(kept)) > 0.1


def test_it_is_not_used_for_samples_of_earlier_weights() -> None:
    poisoned = gradient(lambda part: of_earlier_weights(with_unconditional(part, recorded(part) + POISON)))
    assert torch.equal(poisoned, gradient(lambda part: of_earlier_weights(part)))


def test_it_is_not_used_in_the_second_update() -> None:
    def poisoned(part: Part) -> Part:
        """What was recorded of the rows of the second update is wrong."""
        (_, (second,)) = plan(Batch.of(part, 0, ranks=1), DiffusionGeometry(num_updates_per_batch=2))
        wrong = recorded(part).clone()
        wrong[[part.ids.index(sample_id) for sample_id in second.ids]] += POISON
        return with_unconditional(part, wrong)

    found = gradient(poisoned, num_updates_per_batch=2)
    assert torch.equal(found, gradient(kept, num_updates_per_batch=2))


def test_it_is_not_used_for_the_reference() -> None:
    """The policy takes the wrong velocity, the reference its own: their distance shows it."""
    reports = []
    for change in (kept, lambda part: with_unconditional(part, recorded(part) + POISON)):
        backend = policy(guidance_gradient=False, reference=True)
        reports.append(values(train(backend, FlowGRPO(kl_coef=0.1), change(guided_batch(backend)))))
    assert reports[0]["train/kl"] < 1e-9
    assert reports[1]["train/kl"] > 1.0


def test_what_is_recorded_is_the_unconditional_velocity_at_the_stochastic_steps() -> None:
    backend = policy(OneAndAFifth(), guidance_gradient=False)
    found = recorded(rollout(backend, guidance=4.5))
    assert found.shape == (4, 3, 1, 8, 8)
    torch.testing.assert_close(found, torch.full_like(found, 0.2))
    assert trajectory(rollout(policy(guidance_gradient=True), guidance=4.5)).unconditional is None
