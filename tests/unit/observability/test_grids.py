"""Sample grids: every pixel where it belongs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.observability.grids import before_after, save_grid

GAP = 8


def pictures(count: int, height: int = 8, width: int = 8) -> torch.Tensor:
    """Distinct pictures on the 256 levels of a file."""
    levels = torch.arange(count * 3 * height * width) * 37 % 256
    return (levels / 255).reshape(count, 3, height, width)


def enlarged(picture: torch.Tensor, scale: int) -> np.ndarray:
    """`(H * scale, W * scale, 3)` uint8, each pixel a square."""
    pixels = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return pixels.repeat(scale, 0).repeat(scale, 1)


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_small_pictures_are_enlarged_by_whole_squares_in_row_order(tmp_path: Path) -> None:
    images = pictures(5)
    sheet = read(save_grid(images, tmp_path / "samples" / "grid.png", columns=3, scale=4))
    assert sheet.shape == (2 * 32 + 3 * GAP, 3 * 32 + 4 * GAP, 3)
    for index, image in enumerate(images):
        top, left = GAP + index // 3 * (32 + GAP), GAP + index % 3 * (32 + GAP)
        assert np.array_equal(sheet[top : top + 32, left : left + 32], enlarged(image, 4))
    assert (sheet[GAP + 32 + GAP :, GAP + 2 * (32 + GAP) :] == 255).all()


def test_the_scale_of_small_pictures_makes_them_visible(tmp_path: Path) -> None:
    images = pictures(1)
    sheet = read(save_grid(images, tmp_path / "grid.png", columns=10))
    assert sheet.shape == (8 * 14 + 2 * GAP, 8 * 14 + 2 * GAP, 3)
    assert np.array_equal(sheet[GAP:-GAP, GAP:-GAP], enlarged(images[0], 14))


def test_large_pictures_shrink_to_320_pixels_and_middling_ones_stay(tmp_path: Path) -> None:
    large = read(save_grid(torch.full((1, 3, 512, 1024), 0.5), tmp_path / "large.png", columns=1))
    assert large.shape == (160 + 2 * GAP, 320 + 2 * GAP, 3)
    assert (large[GAP:-GAP, GAP:-GAP] == 128).all()
    middling = pictures(1, 128, 128)
    sheet = read(save_grid(middling, tmp_path / "middling.png", columns=1))
    assert np.array_equal(sheet[GAP:-GAP, GAP:-GAP], enlarged(middling[0], 1))


def test_captions_and_rewards_stand_below_their_pictures(tmp_path: Path) -> None:
    images = pictures(2)
    texts = ["a handwritten seven", "no"]
    sheet = read(save_grid(images, tmp_path / "grid.png", columns=2, captions=texts, rewards=[0.5, 1.0], scale=14))
    assert np.array_equal(sheet[GAP : GAP + 112, GAP : GAP + 112], enlarged(images[0], 14))
    below = sheet[GAP + 112 + GAP // 2 :]
    assert below.shape[0] == 3 * 19 + GAP
    ink = np.all(below < 200, axis=-1)
    # Two lines of caption and the reward below the first picture, one and the reward below the second.
    first, second = ink[:, : GAP + 112], ink[:, GAP + 112 + GAP :]
    assert [bool(first[row : row + 19].any()) for row in (0, 19, 38)] == [True, True, True]
    assert [bool(second[row : row + 19].any()) for row in (0, 19, 38)] == [True, True, False]


def test_one_caption_a_column_heads_the_rows(tmp_path: Path) -> None:
    images = pictures(4)
    sheet = read(save_grid(images, tmp_path / "grid.png", columns=2, captions=["zero", "one"], scale=4))
    head = GAP + 19 + GAP // 2
    assert sheet.shape[0] == head + 2 * (32 + GAP)
    assert (sheet[:head] < 200).any()
    for index, image in enumerate(images):
        top, left = head + index // 2 * (32 + GAP), GAP + index % 2 * (32 + GAP)
        assert np.array_equal(sheet[top : top + 32, left : left + 32], enlarged(image, 4))


def test_before_stands_above_after_with_one_prompt_a_column(tmp_path: Path) -> None:
    prompts, samples, scale = 3, 2, 4
    before, after = pictures(12)[:6], pictures(12)[6:]
    path = before_after(before, after, tmp_path / "grid.png", prompts=["zero", "one", "two"], scale=scale)
    sheet = read(path)
    margin, head = 25 + 2 * GAP, GAP + 19 + GAP // 2 + GAP
    half = samples * (32 + GAP) + 2 * GAP
    assert sheet.shape == (head + 2 * half - 2 * GAP, margin + prompts * (32 + GAP), 3)
    for half_index, images in enumerate((before, after)):
        for prompt in range(prompts):
            for row in range(samples):
                top, left = head + half_index * half + row * (32 + GAP), margin + prompt * (32 + GAP)
                tile = sheet[top : top + 32, left : left + 32]
                assert np.array_equal(tile, enlarged(images[prompt * samples + row], scale))
    assert (sheet[head : head + half, :margin] < 200).any()
    assert (sheet[head + half :, :margin] < 200).any()


def test_long_captions_end_in_an_ellipsis_within_three_lines(tmp_path: Path) -> None:
    short = save_grid(pictures(1), tmp_path / "a.png", columns=1, captions=["word " * 9])
    long = save_grid(pictures(1), tmp_path / "b.png", columns=1, captions=["word " * 900 + "x" * 500])
    assert read(short).shape == read(long).shape
    letters = save_grid(pictures(1), tmp_path / "c.png", columns=1, captions=["x" * 500])
    assert read(letters).shape == read(long).shape


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    with pytest.raises(ValueError, match=r"pictures must be \(N, 3, H, W\) with N of at least 1, got \(0, 3, 8, 8\)"):
        save_grid(torch.zeros(0, 3, 8, 8), path, columns=1)
    with pytest.raises(ValueError, match="at least 1 column, got 0"):
        save_grid(pictures(1), path, columns=0)
    with pytest.raises(ValueError, match="scale must be at least 1, got 0"):
        save_grid(pictures(1), path, columns=1, scale=0)
    with pytest.raises(ValueError, match="3 rewards for 2 pictures"):
        save_grid(pictures(2), path, columns=1, rewards=[1, 2, 3])
    with pytest.raises(ValueError, match="same number of pictures for each of the 3 prompts"):
        before_after(pictures(4), pictures(4), path, prompts=["a", "b", "c"])
    assert not path.exists()
