"""Pictures to latents, for supervised training: what `decode` undoes before its autoencoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.case import Case
from tests.families.cases import cosmos3, krea2
from unirl.types.media import Media


@pytest.mark.parametrize("case", [krea2.CASES[0], cosmos3.CASES[0]], ids=str)
def test_decode_hands_the_autoencoder_what_it_encoded_a_picture_to(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(torch.device("cpu"), torch.float32)
    vae: Any = bundle.frozen["vae"]
    sampling = case.sampling
    pixels = torch.rand(2, 3, sampling.height, sampling.width, generator=torch.Generator().manual_seed(0))
    handed: list[torch.Tensor] = []
    decode = vae.decode

    def watch(latents: torch.Tensor, **settings: Any) -> Any:
        handed.append(latents)
        return decode(latents, **settings)

    monkeypatch.setattr(vae, "decode", watch)
    with torch.no_grad():
        latents = family.encode_media(bundle, Media(images=pixels), sampling)
        family.decode(bundle, latents, sampling)
        mode = vae.encode(pixels[:, :, None] * 2 - 1).latent_dist.mode()
    assert latents.shape[1:] == family.latent_shape(bundle, sampling)
    torch.testing.assert_close(handed[0], mode, rtol=0, atol=1e-5)


def test_cosmos3_makes_pictures_only(tmp_path: Path) -> None:
    case = cosmos3.CASES[0]
    family = case.family(case.write(tmp_path / "model"))
    bundle = family.load(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="1 frame of multiples of 16 pixels"):
        family.latent_shape(bundle, dataclasses.replace(case.sampling, frames=5))
