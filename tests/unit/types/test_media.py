"""What scorers and files see of a picture."""

from __future__ import annotations

import pytest
import torch

from unirl.types.media import Media, to_uint8


def test_levels_are_rounded_to_the_nearest_and_not_cut() -> None:
    """0.999 is 254.7: level 255, where cutting would say 254."""
    levels = torch.tensor([0.0, 0.001, 0.0021, 0.25, 0.5, 0.999, 1.0])
    images = levels.reshape(1, 1, 1, 7).expand(1, 3, 1, 7)
    assert to_uint8(images)[0, 0, :, 0].tolist() == [0, 0, 1, 64, 128, 255, 255]


def test_every_level_survives_the_round_trip() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(to_uint8(levels.to(dtype) / 255), levels.permute(0, 2, 3, 1))


def test_values_outside_the_range_are_clamped() -> None:
    images = torch.tensor([-0.5, 1.5]).reshape(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert to_uint8(images)[0, 0, :, 0].tolist() == [0, 255]


def test_channels_come_last_and_stand_in_one_block() -> None:
    images = torch.stack([torch.full((4, 5), level) for level in (0.0, 0.2, 1.0)])[None]
    pixels = to_uint8(images)
    assert pixels.shape == (1, 4, 5, 3)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert pixels[0, 3, 4].tolist() == [0, 51, 255]


def test_media_of_a_kind_that_is_missing_is_none() -> None:
    texts = Media(texts=["a", "b"])
    assert len(texts) == 2
    assert texts.images is None
    assert Media.concat([texts, texts.select([1])]).texts == ["a", "b", "b"]


def test_texts_and_pictures_are_of_the_same_rows() -> None:
    with pytest.raises(ValueError, match="Media: fields disagree on the number of rows"):
        Media(texts=["a"], images=torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="Media has no field that tells its number of rows"):
        Media()
