"""FLUX.2: klein, guided and distilled, dev, and an edit of two pictures."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from tests.families.case import TEXTS, Case, run_pipeline
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.flux2 import FLUX2Dev, FLUX2Klein
from unirl.models.random_weights.flux2 import write_dev, write_klein
from unirl.models.random_weights.parts import FLUX_TEXT_LAYERS
from unirl.models.sources import to_pil
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

SAMPLING = DiffusionSamplingParams(steps=4, height=64, width=48, guidance=4.0)
# Of different sizes, in 8-bit levels as the pipeline takes them; 67 and 90 are no multiples of a token's 8 pixels.
PICTURES = [torch.rand(3, *size, generator=torch.Generator().manual_seed(size[0])) for size in ((64, 90), (67, 72))]
PICTURES = [(picture * 255).round() / 255 for picture in PICTURES]


@dataclasses.dataclass(frozen=True)
class StepsOfTen(FLUX2Klein):
    """mu as if the picture took ten steps."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        ten = super().schedule(bundle, dataclasses.replace(sampling, steps=10)).sigmas
        sigmas = torch.cat([ten[: sampling.steps], ten[-1:]])
        return Schedule(sigmas, sigmas[:-1])


@dataclasses.dataclass(frozen=True)
class SwappedBranches(FLUX2Klein):
    """The unconditional branch takes the place of the conditional one."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class WithoutSources(FLUX2Klein):
    """The pictures are not looked at."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return super().encode(bundle, dataclasses.replace(prompts, sources=None), sampling)


@dataclasses.dataclass(frozen=True)
class PicturesInReverse(FLUX2Klein):
    """The first picture takes the place in time of the second."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        assert prompts.sources is not None
        reverse = [pictures[::-1] for pictures in prompts.sources]
        return super().encode(bundle, dataclasses.replace(prompts, sources=reverse), sampling)


@dataclasses.dataclass(frozen=True)
class ScaledGuidance(FLUX2Dev):
    """The model multiplies by 1000 itself."""

    def told(self, step: Step, guidance: float) -> torch.Tensor | None:
        return super().told(step, 1000 * guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[Any], Media]:
    steps, output = run_pipeline(
        bundle.processors["pipeline"],
        case.prompts.required_texts,
        latents,
        case,
        max_sequence_length=256 if case.name == "flux2 dev" else 96,
        text_encoder_out_layers=FLUX_TEXT_LAYERS,
        # The pipeline takes one list of pictures for all prompts.
        image=case.prompts.sources and [to_pil(picture) for picture in case.prompts.sources[0]],
    )
    return [step.mT.unflatten(2, latents.shape[-2:]) for step in steps], Media(images=output.images)


def klein(folder: Path, cls: type[FLUX2Klein] = FLUX2Klein) -> FLUX2Klein:
    return cls(checkpoint=str(folder), max_sequence_length=96, text_layers=FLUX_TEXT_LAYERS)


def dev(folder: Path, cls: type[FLUX2Dev] = FLUX2Dev) -> FLUX2Dev:
    # The system message alone takes 180 bytes, which are tokens here.
    return cls(checkpoint=str(folder), max_sequence_length=256, text_layers=FLUX_TEXT_LAYERS)


CASES = [
    Case(
        name="flux2 klein",
        write=write_klein,
        family=klein,
        sampling=SAMPLING,
        reference=reference,
        wrong={
            "shift": functools.partial(klein, cls=StepsOfTen),
            "branches swapped": functools.partial(klein, cls=SwappedBranches),
        },
    ),
    Case(
        name="flux2 klein distilled",
        write=functools.partial(write_klein, distilled=True),
        family=klein,
        sampling=dataclasses.replace(SAMPLING, guidance=1.0),
        reference=reference,
        wrong={"shift": functools.partial(klein, cls=StepsOfTen)},
    ),
    Case(
        name="flux2 klein edit",
        write=write_klein,
        family=klein,
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=list(TEXTS), sources=[PICTURES, PICTURES]),
        wrong={
            "no pictures": functools.partial(klein, cls=WithoutSources),
            "pictures in reverse": functools.partial(klein, cls=PicturesInReverse),
        },
    ),
    Case(
        name="flux2 dev",
        write=write_dev,
        family=dev,
        sampling=SAMPLING,
        reference=reference,
        wrong={"guidance": functools.partial(dev, cls=ScaledGuidance)},
    ),
]
