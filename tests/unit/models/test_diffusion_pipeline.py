"""Requests in, filled samples out: who is encoded, and that a row does not depend on its batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.unit.models.rollouts import PROMPTS, request_for, stage_of
from unirl.models.base import Bundle
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

GUIDED = DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5)


@contextmanager
def rows_encoded(bundle: Bundle) -> Iterator[dict[str, list[int]]]:
    """How many prompts each text encoder was given, call by call."""
    encoders = {name: module for name, module in bundle.frozen.items() if name.startswith("text_encoder")}
    rows: dict[str, list[int]] = {name: [] for name in encoders}
    handles = [
        module.register_forward_hook(lambda _, inputs, __, name=name: rows[name].append(len(inputs[0])))
        for name, module in encoders.items()
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def latents_of(part: Part) -> torch.Tensor:
    assert isinstance(part.segment, LatentSegment)
    return part.segment.latents


def images_of(part: Part) -> torch.Tensor:
    assert part.media is not None
    assert part.media.images is not None
    return part.media.images


def test_the_frontier_is_filled_and_stamped(sd3: SD3, bundle: Bundle) -> None:
    sample = request_for(PROMPTS, group=3, guidance=4.5)
    filled = DiffusionPipeline(stage_of(sd3, bundle))(sample, version=7)
    part = filled.frontier
    assert part.ids == [f"r0.p{row}/{child}" for row in range(2) for child in range(3)]
    assert filled.roots.ids == sample.roots.ids
    assert part.version is not None
    assert part.version.tolist() == [7] * 6
    assert images_of(part).shape == (6, 3, 32, 32)
    assert 0 <= float(images_of(part).min()) < float(images_of(part).max()) <= 1
    assert latents_of(part).shape == (6, 5, 4, 16, 16)
    assert not latents_of(part).requires_grad
    assert len({row.sum().item() for row in images_of(part)}) == 6


@pytest.mark.parametrize(("guidance", "calls"), [(1.0, [2]), (4.5, [2, 1])])
def test_each_distinct_prompt_is_encoded_once(sd3: SD3, bundle: Bundle, guidance: float, calls: list[int]) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    sample = request_for(prompts, group=2, guidance=guidance)
    with rows_encoded(bundle) as rows:
        part = DiffusionPipeline(stage_of(sd3, bundle), batch_size=4)(sample, version=0).frontier
    assert rows == {"text_encoder": calls, "text_encoder_2": calls, "text_encoder_3": calls}
    conditions = part.guidance_branches
    assert torch.equal(conditions.positive.tokens[:2], conditions.positive.tokens[4:])
    assert not torch.equal(conditions.positive.tokens[0], conditions.positive.tokens[2])
    assert (conditions.negative is None) == (guidance == 1)


def test_the_empty_negative_prompt_is_encoded_like_any_other(sd3: SD3, bundle: Bundle) -> None:
    conditions = DiffusionPipeline(stage_of(sd3, bundle)).encode(Media(texts=PROMPTS), GUIDED)
    assert conditions.negative is not None
    own = sd3.encode(bundle, Media(texts=[""]), GUIDED)
    assert torch.equal(conditions.negative.tokens, own.tokens.expand(2, -1, -1))
    assert own.tokens[:, 1:].std() > 0.1


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_a_row_alone_equals_the_row_beside_a_longer_prompt(sd3: SD3, bundle: Bundle, guidance: float) -> None:
    pipeline = DiffusionPipeline(stage_of(sd3, bundle))
    beside = pipeline(request_for(PROMPTS, guidance=guidance), version=0).frontier
    alone = pipeline(request_for(PROMPTS[:1], guidance=guidance), version=0).frontier
    torch.testing.assert_close(latents_of(alone)[0], latents_of(beside)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(images_of(alone)[0], images_of(beside)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_pieces_of_any_size_make_the_same_samples(sd3: SD3, bundle: Bundle, batch_size: int) -> None:
    sample = request_for(PROMPTS, group=3, guidance=4.5)
    whole = DiffusionPipeline(stage_of(sd3, bundle))(sample, version=0).frontier
    cut = DiffusionPipeline(stage_of(sd3, bundle), batch_size)(sample, version=0).frontier
    assert cut.ids == whole.ids
    torch.testing.assert_close(latents_of(cut), latents_of(whole), rtol=0, atol=1e-5)
    assert isinstance(cut.segment, LatentSegment)
    assert isinstance(whole.segment, LatentSegment)
    torch.testing.assert_close(cut.segment.log_probs, whole.segment.log_probs, rtol=0, atol=1e-5)


def test_a_picture_does_not_depend_on_the_pictures_decoded_with_it(sd3: SD3, bundle: Bundle) -> None:
    latents = torch.randn(3, 4, 16, 16)
    together = sd3.decode(bundle, latents, GUIDED)
    apart = Media.concat([sd3.decode(bundle, latents[row : row + 1], GUIDED) for row in range(3)])
    assert together.images is not None
    assert apart.images is not None
    assert torch.equal(together.images, apart.images)


def test_siblings_share_their_first_noise_when_asked_to(sd3: SD3, bundle: Bundle) -> None:
    sample = request_for(PROMPTS, group=2, same_initial_noise=True)
    latents = latents_of(DiffusionPipeline(stage_of(sd3, bundle))(sample, version=0).frontier)
    assert torch.equal(latents[0, 0], latents[1, 0])
    assert not torch.equal(latents[0, 0], latents[2, 0])
    assert not torch.equal(latents[0, 1], latents[1, 1])
