"""TinySD3: its words, its weights, and what its network puts out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.rollouts import CPU, gradients, request_for, stage_of
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.tiny import TinySD3
from unirl.sde.steps import Step
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

GUIDED = DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5)

TINY = TinySD3(head_dim=8, embedding_dim=16)
SEVEN = "a handwritten seven"


def weights(family: TinySD3) -> dict[str, torch.Tensor]:
    return family.load(CPU, torch.float32).transformer.state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step_at(sigma: float) -> Step:
    level = torch.tensor([sigma])
    return Step(torch.zeros(1, dtype=torch.long), sigma=level, sigma_next=level, sigma_star=level, time=level * 1000)


def filled(family: TinySD3, prompts: list[str], **sampling: Any) -> Part:
    stage = stage_of(family, family.load(CPU, torch.float32))
    settings = {"height": family.size, "width": family.size, "guidance": 2.0, **sampling}
    return DiffusionPipeline(stage)(request_for(prompts, **settings), version=0).frontier


def test_weights_depend_on_the_init_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert equal(first, weights(TINY))
    assert not equal(first, weights(dataclasses.replace(TINY, init_seed=1)))


def test_saved_and_loaded_it_is_the_same_model(tmp_path: Path) -> None:
    other = dataclasses.replace(TINY, init_seed=5)
    TINY.save(other.load(CPU, torch.float32), tmp_path)
    assert equal(weights(dataclasses.replace(TINY, checkpoint=tmp_path)), weights(other))


@pytest.mark.parametrize("change", [{"layers": 3}, {"words": 4}, {"predicts": "velocity"}, {"vocabulary": ("a",)}])
def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    TINY.save(TINY.load(CPU, torch.float32), tmp_path)
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"model of another shape: {name}="):
        dataclasses.replace(TINY, checkpoint=tmp_path, **change).load(CPU, torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 9}, "size 9 must be a multiple of patch 4"),
        ({"channels": 2}, "channels must be 1 or 3, got 2"),
        ({"words": 0}, "words must be at least 1, got 0"),
        ({"predicts": "noise"}, "predicts must be x0 or velocity, got 'noise'"),
        ({"checkpoint": Path("/nowhere")}, "checkpoint /nowhere holds no config.json"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinySD3(**settings)


def test_a_word_it_does_not_know_is_named() -> None:
    bundle = TINY.load(CPU, torch.float32)
    with pytest.raises(ValueError, match=r"'a red seven' uses \['red'\], this model knows the words \['a', 'hand"):
        TINY.encode(bundle, Media(texts=[SEVEN, "a red seven"]), GUIDED)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    bundle = TINY.load(CPU, torch.float32)
    with pytest.raises(ValueError, match="has 4 words, this model takes 3"):
        TINY.encode(bundle, Media(texts=["a handwritten seven seven"]), GUIDED)


def test_prompts_are_padded_to_one_length() -> None:
    bundle = TINY.load(CPU, torch.float32)
    assert TINY.encode(bundle, Media(texts=[SEVEN, "two", ""]), GUIDED).tokens.tolist() == [
        [1, 2, 10],
        [5, 0, 0],
        [0, 0, 0],
    ]
    assert TINY.encode(bundle, Media(texts=["two"]), GUIDED).tokens.tolist() == [[5, 0, 0]]


def test_a_row_alone_equals_the_row_beside_a_longer_prompt() -> None:
    beside, alone = filled(TINY, ["two", SEVEN]), filled(TINY, ["two"])
    assert isinstance(beside.segment, LatentSegment)
    assert isinstance(alone.segment, LatentSegment)
    torch.testing.assert_close(alone.segment.latents[0], beside.segment.latents[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("sigma", "divisor"), [(0.8, 0.8), (0.05, 0.05), (0.01, 0.05)])
def test_an_x0_network_is_read_as_a_velocity(sigma: float, divisor: float) -> None:
    bundle = TINY.load(CPU, torch.float32)
    latents, embedding, step = (
        torch.randn(1, 1, 8, 8),
        TINY.encode(bundle, Media(texts=[SEVEN]), GUIDED),
        step_at(sigma),
    )
    put_out = bundle.transformer(latents, step.time, embedding.tokens)
    torch.testing.assert_close(TINY.predict(bundle, latents, step, embedding, 1.0), (latents - put_out) / divisor)
    other = dataclasses.replace(TINY, predicts="velocity")
    assert torch.equal(other.predict(bundle, latents, step, embedding, 1.0), put_out)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_and_latents_are_inverse(channels: int) -> None:
    family = dataclasses.replace(TINY, channels=channels)
    bundle = family.load(CPU, torch.float32)
    images = torch.rand(2, channels, 8, 8).expand(-1, 3, -1, -1)
    latents = family.encode_media(bundle, Media(images=images), GUIDED)
    assert latents.shape == (2, channels, 8, 8)
    decoded = family.decode(bundle, latents, GUIDED).images
    assert decoded is not None
    torch.testing.assert_close(decoded, images)
    assert family.decode(bundle, latents * 9, GUIDED).images.max() == 1  # type: ignore[union-attr]


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="makes 8 x 8 pixels, asked for 8 x 16"):
        filled(TINY, [SEVEN], width=16)


def test_shift_moves_the_schedule_once() -> None:
    part = filled(TINY, [SEVEN], shift=3.0)
    assert isinstance(part.segment, LatentSegment)
    torch.testing.assert_close(part.segment.sigmas, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    torch.testing.assert_close(part.segment.times, torch.tensor([1000.0, 900.0, 750.0, 500.0]))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    bundle = TINY.load(CPU, torch.float32)
    stage = stage_of(TINY, bundle)
    part = DiffusionPipeline(stage)(request_for([SEVEN], height=8, width=8, guidance=2.0), version=0).frontier
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            bundle.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        stage.replay(part, torch.tensor([0, 2])).log_probs.sum().backward()
        grads.append(gradients(bundle.transformer))
    assert equal(*grads)


def test_a_negative_prompt_without_an_unconditional_branch_is_refused() -> None:
    sampling = dataclasses.replace(GUIDED, height=8, width=8, negative_prompt="two")
    TINY.refuse([SEVEN], sampling)
    with pytest.raises(ValueError, match=r"negative_prompt='two' has no effect: at guidance 1\.0 TinySD3"):
        TINY.refuse([SEVEN], dataclasses.replace(sampling, guidance=1.0))
