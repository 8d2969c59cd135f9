"""What the contract does not say of the FLUX families."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.case import TOLERANCE
from tests.families.cases import flux1, flux2, flux3
from tests.families.test_contract import CPU, distance, stage_of, walk
from unirl.models.diffusion.flux1 import FLUX1, preferred_size
from unirl.models.diffusion.flux2 import FLUX2Dev, FLUX2Klein
from unirl.models.diffusion.flux3 import FLUX3
from unirl.models.random_weights.flux1 import write as write_flux1
from unirl.models.random_weights.flux2 import write_klein
from unirl.models.random_weights.flux3 import write as write_flux3
from unirl.models.sources import EditEmbedding
from unirl.train.export import write_export
from unirl.train.lora import LoRA, inject
from unirl.types.media import Media


def test_schnell_and_a_distilled_klein_take_no_guidance(tmp_path: Path) -> None:
    schnell = FLUX1(str(write_flux1(tmp_path / "schnell", guidance=False)))
    klein = FLUX2Klein(str(write_klein(tmp_path / "klein", distilled=True)))
    for family, sampling in ((schnell, flux1.SAMPLING), (klein, flux2.SAMPLING)):
        bundle = family.load(CPU, torch.float32)
        with pytest.raises(ValueError, match=r"takes no guidance: sampling.guidance=1, got (3.5|4.0)"):
            family.schedule(bundle, sampling)
        family.schedule(bundle, dataclasses.replace(sampling, guidance=1.0))
    with pytest.raises(ValueError, match="takes no guidance as an input: leave embedded_guidance null"):
        dataclasses.replace(schnell, embedded_guidance=3.5).load(CPU, torch.float32)


def test_a_source_is_scaled_to_the_size_of_training_nearest_in_shape() -> None:
    assert preferred_size(512, 512) == (1024, 1024)
    assert preferred_size(300, 600) == (720, 1456)  # 2.02; the neighbours are 1.85 and 2.18
    assert preferred_size(600, 300) == (1456, 720)


def test_dev_does_not_edit_and_kontext_edits_one_picture(tmp_path: Path) -> None:
    dev = flux1.family(write_flux1(tmp_path / "dev"))
    kontext = flux1.family(write_flux1(tmp_path / "kontext", edits=True), source_size="own")
    with pytest.raises(ValueError, match=r"does not edit pictures: source pictures need FLUX.1-Kontext"):
        dev.encode(dev.load(CPU, torch.float32), Media(texts=["a"], sources=[[flux1.SOURCE]]), flux1.SAMPLING)
    bundle = kontext.load(CPU, torch.float32)
    two = kontext.encode(bundle, Media(texts=["a"], sources=[[flux1.SOURCE] * 2]), flux1.SAMPLING)
    step = kontext.schedule(bundle, flux1.SAMPLING).at(torch.tensor([0]))
    latents = torch.zeros(1, *kontext.latent_shape(bundle, flux1.SAMPLING))
    with pytest.raises(ValueError, match="edits one picture, got 2 for a prompt"):
        kontext.predict(bundle, latents, step, two, 1.0)


def test_a_folder_of_another_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(write_klein(tmp_path / "klein"))
    for family in (FLUX1, FLUX2Dev, FLUX3):
        with pytest.raises(ValueError, match=r"klein holds (a Flux2KleinPipeline|no modular_model_index.json)"):
            family(folder)


def test_sources_of_different_sizes_do_not_share_a_forward(tmp_path: Path) -> None:
    family = flux2.klein(write_klein(tmp_path / "klein"))
    bundle = family.load(CPU, torch.float32)
    prompts = Media(texts=["a", "b"], sources=[flux2.PICTURES[:1], flux2.PICTURES[1:]])
    embedding = family.encode(bundle, prompts, flux2.SAMPLING)
    assert isinstance(embedding, EditEmbedding)
    assert embedding.sources is not None
    # 64 x 90 and 67 x 72 pixels, 8 to a token.
    assert [picture.shape[1:] for row in embedding.sources for picture in row] == [(8, 11), (8, 9)]
    latents = torch.zeros(2, *family.latent_shape(bundle, flux2.SAMPLING))
    step = family.schedule(bundle, flux2.SAMPLING).at(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"source pictures of one forward must be of the same sizes"):
        family.predict(bundle, latents, step, embedding, 1.0)


def test_pictures_and_latents_of_flux2_are_the_inverse_of_each_other_in_scale(tmp_path: Path) -> None:
    """The latents that a picture has are those whose statistics the batch norm holds: normal again."""
    family = flux2.klein(write_klein(tmp_path / "klein"))
    bundle = family.load(CPU, torch.float32)
    vae: Any = bundle.frozen["vae"]
    picture = torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = vae.encode(picture * 2 - 1).latent_dist.mode()
        patched = torch.nn.functional.pixel_unshuffle(plain, 2)
        expected = torch.nn.functional.batch_norm(
            patched, vae.bn.running_mean, vae.bn.running_var, eps=vae.config.batch_norm_eps
        )
        torch.testing.assert_close(family.encode_media(bundle, Media(images=picture), flux2.SAMPLING), expected)


def test_flux3_sees_two_sources_as_its_own_pipeline_does(tmp_path: Path) -> None:
    case = flux3.TWO_PICTURES
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(CPU, torch.float32)
    assert distance(case, family, bundle, family) < TOLERANCE


def test_a_flow_map_samples_as_its_own_pipeline_does_and_knows_where_a_step_ends(tmp_path: Path) -> None:
    case = flux3.FLOW_MAP
    folder = case.write(tmp_path / "model")
    family = case.family(folder)
    bundle = family.load(CPU, torch.float32)
    assert distance(case, family, bundle, family) < TOLERANCE
    assert distance(case, case.wrong["target"](folder), bundle, family) > 10 * TOLERANCE


def test_a_flow_map_refuses_stochastic_steps_guidance_and_losses_on_points(tmp_path: Path) -> None:
    family = flux3.family(write_flux3(tmp_path / "model", flow_map=True))
    bundle = family.load(CPU, torch.float32)
    deterministic = flux3.FLOW_MAP.sampling
    for change in ({"noise_level": 0.7}, {"guidance": 4.0}):
        with pytest.raises(ValueError, match="is a flow map, distilled for deterministic steps without guidance"):
            family.schedule(bundle, dataclasses.replace(deterministic, **change))
    with pytest.raises(ValueError, match="flow map: it has no velocity at a point, train the base checkpoint"):
        family.refuse_points(bundle)


def test_an_adapter_of_flux3_is_what_its_own_pipeline_loads(tmp_path: Path) -> None:
    family = flux3.family(write_flux3(tmp_path / "model"))
    lora = LoRA(rank=2, alpha=4)
    bundle, plain = (family.load(CPU, torch.float32) for _ in range(2))
    inject(bundle.transformer, lora, family.lora_targets, seed=0)
    draws = torch.Generator().manual_seed(1)
    for parameter in (p for p in bundle.transformer.parameters() if p.requires_grad):
        parameter.data = torch.randn(parameter.shape, generator=draws)
    write_export(stage_of(family, bundle), lora, tmp_path / "adapter")
    before = walk(family, plain, flux3.CASES[0]).latents[-1]
    plain.processors["pipeline"].load_lora_weights(str(tmp_path / "adapter"))
    ours, theirs = (walk(family, found, flux3.CASES[0]).latents[-1] for found in (bundle, plain))
    assert float((before - ours).abs().max()) > 0.1
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
