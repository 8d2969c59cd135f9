"""Rollout, replay and predictions of the stage, on the tiny SD3 pipeline."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from tests.unit.models.rollouts import CPU, PROMPTS, gradients, inputs_of, request_for, stage_of
from unirl.models.base import Bundle, classifier_free
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.diffusion_stage import DiffusionStage
from unirl.sde.steps import Step
from unirl.types.condition import Conditions
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

GUIDED = DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5)

STEPS = torch.tensor([0, 1, 2])  # the stochastic ones of four


def rollout(stage: DiffusionStage, *, group: int = 2, **sampling: object) -> Part:
    """Both prompts, guided unless `sampling` says otherwise."""
    sample = request_for(PROMPTS, group=group, **{"guidance": 4.5, **sampling})
    return DiffusionPipeline(stage)(sample, version=0).frontier


def trajectory(part: Part) -> LatentSegment:
    assert isinstance(part.segment, LatentSegment)
    return part.segment


def some_step(rows: int) -> Step:
    sigma = torch.linspace(0.2, 0.9, rows)
    index = torch.zeros(rows, dtype=torch.long)
    return Step(index=index, sigma=sigma, sigma_next=sigma - 0.1, sigma_star=sigma, time=sigma * 1000)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("strategy", ["flow", "dance", "cps"])
@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16"])
def test_replay_gives_the_rollouts_log_probs_bit_for_bit(
    sd3: SD3, bundle: Bundle, guidance: float, strategy: str, storage_dtype: str
) -> None:
    stage = stage_of(sd3, bundle)
    part = rollout(stage, guidance=guidance, strategy=strategy, storage_dtype=storage_dtype)
    replayed = [stage.replay(part, STEPS[i : i + 1]).log_probs for i in range(3)]
    assert torch.equal(torch.cat(replayed, dim=1), trajectory(part).log_probs)


def test_replay_of_all_steps_in_one_forward_equals_one_forward_a_step(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    part = rollout(stage)
    with torch.no_grad():
        together = stage.replay(part, STEPS)
        single = [stage.replay(part, STEPS[i : i + 1]) for i in range(3)]
    for name in ("log_probs", "means"):
        apart = torch.cat([getattr(replay, name) for replay in single], dim=1)
        torch.testing.assert_close(getattr(together, name), apart, rtol=1e-6, atol=1e-6)
    assert torch.equal(together.dts, torch.cat([replay.dts for replay in single]))


def test_replay_of_one_row_equals_its_replay_in_the_batch(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    part = rollout(stage)
    with torch.no_grad():
        whole = stage.replay(part, STEPS).log_probs
        rows = [stage.replay(part.select([row]), STEPS).log_probs for row in range(len(part))]
    torch.testing.assert_close(torch.cat(rows), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("guidance_gradient", "forwards"), [(True, [24]), (False, [12, 12])])
def test_replay_without_a_graph_does_the_forwards_of_training(
    sd3: SD3, bundle: Bundle, guidance_gradient: bool, forwards: list[int]
) -> None:
    stage = stage_of(sd3, bundle, guidance_gradient=guidance_gradient)
    part = rollout(stage)
    with inputs_of(bundle.transformer) as seen:
        trained = stage.replay(part, STEPS)
        with torch.no_grad():
            frozen = stage.replay(part, STEPS)
    # The low bits of a forward depend on its batch: pi_old and the reference must share the batch of pi.
    assert [len(latents) for latents in seen] == forwards * 2
    assert trained.log_probs.requires_grad
    assert torch.equal((trained.log_probs - frozen.log_probs).exp(), torch.ones(4, 3))
    assert torch.equal(trained.means, frozen.means)


def test_guidance_of_4_5_makes_3_8_of_1_and_0_2() -> None:
    torch.testing.assert_close(classifier_free(torch.tensor(1.0), torch.tensor(0.2), 4.5), torch.tensor(3.8))


def test_without_guidance_no_unconditional_forward_is_done(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    with inputs_of(bundle.transformer) as seen:
        rollout(stage, guidance=1.0)
    assert [len(latents) for latents in seen] == [4, 4, 4, 4]
    with inputs_of(bundle.transformer) as seen:
        rollout(stage, guidance=4.5)
    assert [len(latents) for latents in seen] == [8, 8, 8, 8]


def test_without_guidance_gradient_the_value_stays_and_only_the_conditional_branch_has_a_gradient(
    sd3: SD3, bundle: Bundle
) -> None:
    conditions = DiffusionPipeline(stage_of(sd3, bundle)).encode(Media(texts=PROMPTS), GUIDED)
    assert conditions.negative is not None
    latents, step, weight = torch.randn(2, 4, 16, 16), some_step(2), torch.randn(2, 4, 16, 16)
    values, grads = {}, {}
    for asked in (True, False):
        conditions.negative.tokens.grad = None
        conditions.negative.tokens.requires_grad_(True)
        value, _ = stage_of(sd3, bundle, guidance_gradient=asked).predict(latents, step, conditions, 4.5)
        (value * weight).sum().backward()
        values[asked], grads[asked] = value.detach(), gradients(bundle.transformer)
        reached = conditions.negative.tokens.grad
        assert (reached is not None and bool(reached.any())) == asked
    torch.testing.assert_close(values[True], values[False], rtol=0, atol=1e-5)
    alone = sd3.predict(bundle, latents, step, conditions.positive, 1.0)
    (4.5 * alone * weight).sum().backward()
    expected = gradients(bundle.transformer)
    assert set(grads[False]) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[False][name], gradient, rtol=1e-4, atol=1e-4)
    assert any((grads[True][name] - grads[False][name]).abs().max() > 1 for name in expected)


def test_a_forward_without_graph_takes_no_gradient_from_the_autocast_forward_after_it(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle, guidance_gradient=False, compute_dtype=torch.bfloat16)
    conditions = DiffusionPipeline(stage).encode(Media(texts=PROMPTS), GUIDED)
    latents, step = torch.randn(2, 4, 16, 16), some_step(2)
    stage.predict(latents, step, conditions, 4.5)[0].sum().backward()
    both = gradients(bundle.transformer)
    stage.predict(latents, step, dataclasses.replace(conditions, negative=None), 1.0)[0].sum().backward()
    alone = gradients(bundle.transformer)
    assert set(both) == {name for name, _ in bundle.transformer.named_parameters()}
    for name, gradient in alone.items():
        torch.testing.assert_close(both[name], 4.5 * gradient, rtol=0.1, atol=0.1 * float(gradient.abs().max()))


def test_the_unconditional_velocity_of_the_rollout_stands_in_while_the_weights_are_unchanged(
    sd3: SD3, bundle: Bundle
) -> None:
    stage = stage_of(sd3, bundle, guidance_gradient=False)
    part = rollout(stage)
    assert trajectory(part).unconditional is not None
    with inputs_of(bundle.transformer) as seen:
        reused = stage.replay(part, STEPS[1:], unchanged=True)
    assert [len(latents) for latents in seen] == [4 * 2]
    (reused.log_probs.sum()).backward()
    with_reuse = gradients(bundle.transformer)
    anew = stage.replay(part, STEPS[1:])
    anew.log_probs.sum().backward()
    torch.testing.assert_close(reused.log_probs, anew.log_probs, rtol=0, atol=1e-6)
    for name, gradient in gradients(bundle.transformer).items():
        torch.testing.assert_close(with_reuse[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_trajectory_stored_is_the_one_walked(
    sd3: SD3, bundle: Bundle, dtype: Literal["bfloat16", "float16"]
) -> None:
    stage = stage_of(sd3, bundle)
    with inputs_of(bundle.transformer) as seen:
        segment = trajectory(rollout(stage, guidance=1.0, storage_dtype=dtype))
    assert segment.latents.dtype == getattr(torch, dtype)
    assert segment.positions.tolist() == [0, 1, 2, 3, 4]
    for position, walked in enumerate(seen):
        assert torch.equal(segment.latents[:, position].float(), walked.float())


def test_gradient_checkpointing_changes_no_gradient(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    part = rollout(stage)
    stage.replay(part, STEPS).log_probs.sum().backward()
    plain = gradients(bundle.transformer)
    bundle.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    forwards = []
    block = bundle.transformer.get_submodule("transformer_blocks.0")
    block.register_forward_pre_hook(lambda *_: forwards.append(None))
    stage.replay(part, STEPS).log_probs.sum().backward()
    assert len(forwards) == 2  # once forward, once again in backward
    for name, gradient in gradients(bundle.transformer).items():
        assert torch.equal(gradient, plain[name]), name


def test_a_rollout_leaves_the_mode_of_every_module_alone_even_when_it_fails(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    with pytest.raises(ValueError, match="multiples of 4 pixels"):
        rollout(stage, height=31)
    rollout(stage)
    assert not any(module.training for module in bundle.transformer.modules())
    assert all(parameter.requires_grad for parameter in bundle.transformer.parameters())


def test_velocity_at_points_off_the_trajectory_is_the_prediction_of_each_point(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    conditions = DiffusionPipeline(stage).encode(Media(texts=PROMPTS), GUIDED)
    latents, sigma = torch.randn(2, 3, 4, 16, 16), torch.rand(2, 3) * 0.8 + 0.1
    with torch.no_grad():
        velocity = stage.velocity(
            conditions, latents, sigma=sigma, time=sd3.time(bundle, sigma, tuple(latents.shape[2:])), guidance=4.5
        )
        for row in range(2):
            for point in range(3):
                own: Conditions = conditions.select([row])
                step = dataclasses.replace(some_step(1), time=sigma[row, point][None] * 1000)
                alone, _ = stage.predict(latents[row, point][None], step, own, 4.5)
                torch.testing.assert_close(velocity[row, point], alone[0], rtol=0, atol=2e-5)


def test_the_recorded_schedule_is_the_one_replayed(sd3: SD3, bundle: Bundle) -> None:
    stage = stage_of(sd3, bundle)
    part = rollout(stage, shift=5.0)
    other = DiffusionStage(
        dataclasses.replace(sd3, schedule_table="shifted"), bundle, guidance_gradient=True, compute_dtype=torch.float32
    )
    assert torch.equal(other.schedule(part).sigmas, trajectory(part).sigmas)
    assert torch.equal(other.replay(part, STEPS).log_probs, stage.replay(part, STEPS).log_probs)


def test_a_stage_loaded_anew_replays_the_rollout_of_another(sd3: SD3, bundle: Bundle) -> None:
    part = rollout(stage_of(sd3, bundle))
    fresh = stage_of(sd3, sd3.load(CPU, torch.float32))
    replayed = [fresh.replay(part, STEPS[i : i + 1]).log_probs for i in (2, 0, 1)]
    assert torch.equal(torch.cat(replayed, dim=1), trajectory(part).log_probs[:, [2, 0, 1]])
