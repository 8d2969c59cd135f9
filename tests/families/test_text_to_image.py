"""Sana, Z-Image, Lumina2 and CogView4: given pictures, and what each of them refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.families.case import Case
from tests.families.cases import cogview4, lumina2, sana, z_image
from unirl.models.diffusion.z_image import ZImage
from unirl.types.media import Media

CPU = torch.device("cpu")
FIRST = [module.CASES[0] for module in (sana, z_image, lumina2, cogview4)]


def replace_scheduler(checkpoint: Path, **settings: object) -> None:
    path = checkpoint / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_given_picture_comes_back_as_the_autoencoder_alone_gives_it_back(case: Case, tmp_path: Path) -> None:
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(CPU, torch.float32)
    pictures = torch.rand(2, 3, case.sampling.height, case.sampling.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = family.encode_media(bundle, Media(images=pictures), case.sampling)
        returned = family.decode(bundle, latents, case.sampling).images
        alone = bundle.frozen["vae"](pictures * 2 - 1).sample
    assert returned is not None
    assert latents.shape[1:] == family.latent_shape(bundle, case.sampling)
    torch.testing.assert_close(returned, (alone / 2 + 0.5).clamp(0, 1))


@pytest.mark.parametrize("case", [sana.CASES[0], lumina2.CASES[0]], ids=str)
def test_gemma_in_float16_is_refused_before_anything_is_loaded(case: Case, tmp_path: Path) -> None:
    family = case.family(case.write(tmp_path / "model"))
    with pytest.raises(ValueError, match="overflows in float16"):
        family.load(CPU, torch.float32, frozen_dtype=torch.float16)


def test_a_checkpoint_of_sana_sprint_is_another_kind_of_model(tmp_path: Path) -> None:
    checkpoint = sana.write(tmp_path / "model")
    index = checkpoint / "model_index.json"
    index.write_text(index.read_text().replace("DPMSolverMultistepScheduler", "SCMScheduler"))
    replace_scheduler(checkpoint, _class_name="SCMScheduler")
    with pytest.raises(ValueError, match="the checkpoint has SCMScheduler"):
        sana.family(checkpoint).load(CPU, torch.float32)


def test_a_bound_on_the_norm_of_a_velocity_is_positive() -> None:
    with pytest.raises(ValueError, match="norm_limit must be positive, or null"):
        ZImage("owner/name", norm_limit=0.0)


def test_cogview4_needs_the_size_of_the_picture_for_its_shift_and_for_the_time_of_a_noise_level(tmp_path: Path) -> None:
    checkpoint = cogview4.write(tmp_path / "model")
    family = cogview4.family(checkpoint)
    with pytest.raises(ValueError, match="depends on the size of the picture"):
        family.time(family.load(CPU, torch.float32), torch.tensor([0.5]))
    replace_scheduler(checkpoint, use_dynamic_shifting=False)
    with pytest.raises(ValueError, match="shifts by the size of what it makes"):
        family.load(CPU, torch.float32)
