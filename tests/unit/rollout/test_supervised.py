from __future__ import annotations

import pytest
import torch

from tests.tiny_policy import SAMPLING, policy
from unirl.rollout.supervised import SupervisedEncoder
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.segment import CleanLatents


def record(latents: torch.Tensor | None = None, images: torch.Tensor | None = None) -> Part:
    segment = None if latents is None else CleanLatents(latents=latents)
    media = Media(texts=["one", "two"], images=images)
    return Part(ids=["r0.p0", "r0.p1"], metadata=[{}, {}], media=media, segment=segment)


def test_latents_that_were_computed_before_train_as_their_pictures_do() -> None:
    encoder = SupervisedEncoder(policy(), SAMPLING)
    pictures = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    first = encoder.encode(record(images=pictures))
    assert isinstance(first.segment, CleanLatents)
    again = encoder.encode(record(latents=first.segment.latents))
    assert isinstance(again.segment, CleanLatents)
    assert torch.equal(again.segment.latents, first.segment.latents)
    assert torch.equal(again.guidance_branches.positive.tokens, first.guidance_branches.positive.tokens)


def test_latents_of_another_size_are_refused_with_the_shape_that_fits() -> None:
    encoder = SupervisedEncoder(policy(), SAMPLING)
    with pytest.raises(
        ValueError, match=r"have the shape \(3, 5, 5\); for sampling of 8 x 8 TinySD3 makes \(1, 8, 8\)"
    ):
        encoder.encode(record(latents=torch.zeros(2, 3, 5, 5)))
