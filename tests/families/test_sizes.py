"""Sizes are refused before anything is loaded: of a hub id by what is published, of a folder by its configs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.families.case import Case
from tests.families.cases import sd3
from unirl.models.catalogue import families
from unirl.models.published import PublishedFamily
from unirl.types.sampling import DiffusionSamplingParams

# Pixels of a token's side, and frames of a latent, in the published checkpoints.
PUBLISHED = {
    "CogView4": (16, None),
    "Cosmos3": (16, None),
    "FLUX1": (16, None),
    "FLUX2Dev": (16, None),
    "FLUX2Klein": (16, None),
    "FLUX3": (16, None),
    "HunyuanImage": (32, None),
    "HunyuanVideo": (16, 4),
    "HunyuanVideo15": (16, 4),
    "HunyuanVideo15I2V": (16, 4),
    "Krea2": (16, None),
    "LTX2": (32, 8),
    "Lumina2": (16, None),
    "QwenImage": (16, None),
    "QwenImage21": (32, None),
    "QwenImageEdit": (16, None),
    "SD3": (16, None),
    "Sana": (32, None),
    "Wan21": (16, 4),
    "Wan21ImageToVideo": (16, 4),
    "Wan22A14B": (16, 4),
    "Wan22TI2V5B": (32, 4),
    "ZImage": (16, None),
}


def test_every_published_family_states_its_sizes() -> None:
    assert {name for name, family in families().items() if issubclass(family, PublishedFamily)} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hub_id_refuses_a_size_off_by_one_and_names_the_nearest(name: str) -> None:
    cell, stride = PUBLISHED[name]
    found = families()[name]
    assert issubclass(found, PublishedFamily)
    family = found("nobody/nothing")
    height, width, frames = 3 * cell, 5 * cell, 1 if stride is None else 2 * stride + 1
    sampling = DiffusionSamplingParams(steps=4, height=height, width=width, frames=frames)
    family.refuse([], sampling)
    for change in ({"height": height + 1}, {"width": width - 1}):
        with pytest.raises(ValueError, match=rf"the nearest is .*{height} x {width}$"):
            family.refuse([], dataclasses.replace(sampling, **change))
    with pytest.raises(ValueError, match="single images" if stride is None else f"the nearest is {frames} of "):
        family.refuse([], dataclasses.replace(sampling, frames=frames + 1))


def test_a_folder_refuses_a_size_off_by_one_by_its_configs(case: Case, checkpoint: Path) -> None:
    family = case.family(checkpoint)
    family.refuse([], case.sampling)
    with pytest.raises(ValueError, match=rf"nearest is .*{case.sampling.height} x {case.sampling.width}$"):
        family.refuse([], dataclasses.replace(case.sampling, height=case.sampling.height + 1))


def test_a_folder_without_the_config_of_its_autoencoder_is_no_whole_pipeline(tmp_path: Path) -> None:
    [case] = sd3.CASES
    family = case.family(case.write(tmp_path / "model"))
    shutil.rmtree(tmp_path / "model" / "vae")
    with pytest.raises(ValueError, match=r"holds no vae/config.json: it is no whole diffusers pipeline"):
        family.refuse([], case.sampling)
