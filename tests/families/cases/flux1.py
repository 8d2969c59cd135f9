"""FLUX.1: dev with its guidance as an input, dev with classifier-free guidance beside it, schnell, Kontext."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from tests.families.case import TEXTS, Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.flux1 import FLUX1
from unirl.models.latents import pack, unpack
from unirl.models.random_weights.flux1 import write
from unirl.models.sources import to_pil
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# In 8-bit levels, as the pipeline takes it; 30 is no multiple of a token's 4 pixels.
SOURCE = torch.randint(256, (3, 30, 40), generator=torch.Generator().manual_seed(0)) / 255
SAMPLING = DiffusionSamplingParams(steps=4, height=32, width=48, guidance=3.5)


@dataclasses.dataclass(frozen=True)
class ThousandfoldTime(FLUX1):
    """The model multiplies by 1000 itself."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return 1000 * sigma


@dataclasses.dataclass(frozen=True)
class UnpackedShift(FLUX1):
    """Each latent element counts as a token, so that the table is that of a picture four times as large."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        larger = dataclasses.replace(sampling, height=2 * sampling.height, width=2 * sampling.width)
        return super().schedule(bundle, larger)


@dataclasses.dataclass(frozen=True)
class ScaledGuidance(FLUX1):
    """The model multiplies by 1000 itself."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, embedding, 1000 * guidance)


@dataclasses.dataclass(frozen=True)
class TransposedPatches(FLUX1):
    """Rows and columns of a patch change places."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents.mT, step, embedding, guidance).mT


@dataclasses.dataclass(frozen=True)
class WithoutSource(FLUX1):
    """The source is not looked at."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return super().encode(bundle, dataclasses.replace(prompts, sources=None), sampling)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case, **arguments: Any) -> tuple[list[Any], Media]:
    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    texts = case.prompts.required_texts
    pipeline = bundle.processors["pipeline"]
    steps, output = run_pipeline(pipeline, texts, pack(latents), case, max_sequence_length=48, **arguments)
    return [unpack(step, height, width) for step in steps], Media(images=output.images)


def kontext_reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[Any], Media]:
    assert case.prompts.sources is not None
    source = to_pil(case.prompts.sources[0][0])
    area = case.sampling.height * case.sampling.width
    return reference(bundle, latents, case, image=source, max_area=area, _auto_resize=False)


def family(folder: Path, cls: type[FLUX1] = FLUX1, **settings: Any) -> FLUX1:
    return cls(checkpoint=str(folder), max_sequence_length=48, **settings)


CASES = [
    Case(
        name="flux1 dev",
        write=write,
        family=family,
        sampling=SAMPLING,
        reference=reference,
        wrong={
            "time": functools.partial(family, cls=ThousandfoldTime),
            "shift": functools.partial(family, cls=UnpackedShift),
            "guidance": functools.partial(family, cls=ScaledGuidance),
            "patches": functools.partial(family, cls=TransposedPatches),
        },
    ),
    Case(
        name="flux1 dev classifier-free",
        write=write,
        family=functools.partial(family, embedded_guidance=3.5),
        sampling=dataclasses.replace(SAMPLING, guidance=2.0, negative_prompt="a dog"),
        reference=functools.partial(
            reference, guidance_scale=3.5, true_cfg_scale=2.0, negative_prompt=["a dog", "a dog"]
        ),
        wrong={"guidance": functools.partial(family, embedded_guidance=2.0), "one branch": family},
    ),
    Case(
        name="flux1 schnell",
        write=functools.partial(write, guidance=False),
        family=family,
        sampling=dataclasses.replace(SAMPLING, guidance=1.0),
        reference=reference,
        wrong={"time": functools.partial(family, cls=ThousandfoldTime)},
    ),
    Case(
        name="flux1 kontext",
        write=functools.partial(write, edits=True),
        family=functools.partial(family, source_size="own"),
        sampling=SAMPLING,
        reference=kontext_reference,
        prompts=Media(texts=list(TEXTS), sources=[[SOURCE], [SOURCE]]),
        wrong={"no source": functools.partial(family, cls=WithoutSource)},
    ),
]
