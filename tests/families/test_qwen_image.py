"""What is the Qwen-Image families' own: schedules, transparency, and what they refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.families.cases.qwen_image import CASES as IMAGE
from tests.families.cases.qwen_image_2_1 import CASES as IMAGE_2_1
from tests.families.cases.qwen_image_edit import CASES as EDIT
from unirl.models.diffusion.qwen_image import QwenImage
from unirl.models.diffusion.qwen_image_2_1 import QwenImage21, on_white
from unirl.models.diffusion.qwen_image_edit import QwenImageEdit
from unirl.types.media import Media

CPU = torch.device("cpu")


def test_one_step_is_refused_as_nothing_is_left_to_stretch(tmp_path: Path) -> None:
    [case] = IMAGE
    family = case.family(case.write(tmp_path))
    bundle = family.load(CPU, torch.float32)
    with pytest.raises(ValueError, match="at least 2 steps, got 1"):
        family.schedule(bundle, dataclasses.replace(case.sampling, steps=1))


def test_a_given_shift_takes_the_place_of_the_one_by_size(tmp_path: Path) -> None:
    [case] = IMAGE
    family = case.family(case.write(tmp_path))
    bundle = family.load(CPU, torch.float32)
    sigmas = family.schedule(bundle, dataclasses.replace(case.sampling, steps=3, shift=3.0)).sigmas
    # 1, 6/7 and 3/5: gaps of 1/7 and 2/5, stretched by 0.98 / 0.4.
    torch.testing.assert_close(sigmas, torch.tensor([1.0, 0.65, 0.02, 0.0]))


def test_a_prompt_without_a_picture_is_refused(tmp_path: Path) -> None:
    case = EDIT[0]
    family = case.family(case.write(tmp_path))
    bundle = family.load(CPU, torch.float32)
    with pytest.raises(ValueError, match="'make it red' comes without a source picture"):
        family.encode(bundle, Media(texts=["make it red"]), case.sampling)


def test_a_folder_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    folder = EDIT[0].write(tmp_path)
    with pytest.raises(ValueError, match="holds a QwenImageEditPlusPipeline, this family is QwenImagePipeline"):
        QwenImage(str(folder))


def test_areas_below_one_block_of_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="32 x 32"):
        QwenImageEdit("Qwen/Qwen-Image-Edit-2511", condition_area=1000)


def test_a_transparent_pixel_is_white_and_an_opaque_one_keeps_its_colour() -> None:
    pixels = torch.tensor([[0.2, 0.4, 0.6, 0.0], [0.2, 0.4, 0.6, 1.0], [0.2, 0.4, 0.6, 0.5]]).T.reshape(1, 4, 1, 3)
    expected = torch.tensor([[1.0, 1.0, 1.0], [0.2, 0.4, 0.6], [0.6, 0.7, 0.8]])
    torch.testing.assert_close(on_white(pixels)[0, :, 0].T, expected)


def test_a_schedule_of_the_checkpoint_fixes_the_number_of_steps(tmp_path: Path) -> None:
    case = IMAGE_2_1[0]
    family = case.family(case.write(tmp_path))
    bundle = family.load(CPU, torch.float32)
    bundle.processors["pipeline"].register_to_config(sample_sigmas=[1.0, 0.5])
    two = dataclasses.replace(case.sampling, steps=2, shift=3.0)
    # shift(1/2) = 3 / 4
    torch.testing.assert_close(family.schedule(bundle, two).sigmas, torch.tensor([1.0, 0.75, 0.0]))
    with pytest.raises(ValueError, match="has 2 steps, asked for 4"):
        family.schedule(bundle, case.sampling)
    uniform = QwenImage21(str(tmp_path), schedule_table="uniform")
    assert len(uniform.schedule(bundle, case.sampling)) == 4
