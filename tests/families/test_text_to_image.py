"""Sana, Z-Image, Lumina2 and CogView4: given pictures, and what each of them refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.families.case import TEXTS, Case
from tests.families.cases import cogview4, lumina2, sana, z_image
from tests.tiny_policy import policy, train
from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.records import Records, RecordSampler
from unirl.models.diffusion.z_image import ZImage
from unirl.rollout.supervised import SupervisedEncoder
from unirl.train.optim import AdamW
from unirl.types.media import Media
from unirl.types.metric import values

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


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_three_steps_on_given_pictures_lower_the_loss(case: Case, tmp_path: Path) -> None:
    backend = policy(case.family(case.write(tmp_path / "model")), optimizer=AdamW(lr=1e-3))
    pictures = torch.rand(2, 3, case.sampling.height, case.sampling.width, generator=torch.Generator().manual_seed(0))
    records = RecordSampler(Records(pictures, list(TEXTS)), 2, seed=0)
    part = SupervisedEncoder(backend, case.sampling).encode(records.draw(0))
    losses = [values(train(backend, FlowSFT(seed=1), part))["train/loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_the_time_of_a_noise_level_in_cogview4_is_its_schedules_and_falls_with_the_size(tmp_path: Path) -> None:
    family = cogview4.family(cogview4.write(tmp_path / "model"))
    bundle = family.load(CPU, torch.float32)
    half = torch.tensor([0.5])
    # A shift of 0.25 + 0.75 sqrt(tokens / 256) is 1, and 1.75, which shifts 4 / 11 to a half.
    torch.testing.assert_close(family.time(bundle, half, (4, 32, 32)), torch.tensor([500.0]))
    torch.testing.assert_close(family.time(bundle, half, (4, 64, 64)), torch.tensor([4000 / 11]))
    schedule = family.schedule(bundle, cogview4.CASES[0].sampling)
    torch.testing.assert_close(schedule.times, torch.tensor([1000.0, 667.0, 334.0, 1.0]))


def test_cogview4_needs_a_scheduler_that_shifts_by_the_size_of_the_picture(tmp_path: Path) -> None:
    checkpoint = cogview4.write(tmp_path / "model")
    replace_scheduler(checkpoint, use_dynamic_shifting=False)
    with pytest.raises(ValueError, match="shifts by the size of what it makes"):
        cogview4.family(checkpoint).load(CPU, torch.float32)
