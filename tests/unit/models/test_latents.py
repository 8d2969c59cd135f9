"""How latents lie over pixels, and the tokens that they make."""

from __future__ import annotations

import pytest
import torch

from unirl.models.latents import Grid, pack, unpack
from unirl.types.sampling import DiffusionSamplingParams


def sized(height: int, width: int, frames: int = 1) -> DiffusionSamplingParams:
    return DiffusionSamplingParams(steps=4, height=height, width=width, frames=frames)


def test_a_token_is_a_square_of_four_places_and_unpacks_again() -> None:
    latents = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    tokens = pack(latents)
    assert tokens.shape == (2, 2 * 3, 3 * 4)
    # Rows 0 and 1, columns 2 and 3, channel by channel.
    assert tokens[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33, 50, 51, 56, 57]
    assert torch.equal(unpack(tokens, 2, 3), latents)


def test_the_nearest_size_is_named() -> None:
    Grid(scale=16).check(sized(64, 4096))
    Grid(scale=16, largest=4).check(sized(64, 128))
    with pytest.raises(ValueError, match=r"asked for 65 x 1; the nearest is 64 x 32$"):
        Grid(scale=16).check(sized(65, 1))
    with pytest.raises(ValueError, match=r"32 pixels up to 128, asked for 64 x 4096; the nearest is 64 x 128$"):
        Grid(scale=16, largest=4).check(sized(64, 4096))


def test_frames_are_a_first_one_and_whole_strides() -> None:
    video = Grid(scale=8, stride=4)
    video.check(sized(32, 48, 9))
    with pytest.raises(ValueError, match=r"4 k \+ 1 frames of multiples of 16 .* 8 of 32 x 48; .* is 9 of 32 x 48$"):
        video.check(sized(32, 48, 8))
    with pytest.raises(ValueError, match=r"1 frame of multiples of 16 pixels, .*; the nearest is 1 of 32 x 48$"):
        Grid(scale=8).check(sized(32, 48, 5))


def test_latents_and_tokens_of_a_size() -> None:
    picture, video = Grid(scale=8), Grid(scale=8, stride=4)
    assert (picture.shape(sized(32, 48)), picture.tokens(sized(32, 48))) == ((4, 6), 6)
    assert (video.shape(sized(32, 48, 9)), video.tokens(sized(32, 48, 9))) == ((3, 4, 6), 18)
