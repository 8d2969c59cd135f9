"""Sana against SanaPipeline with its scheduler swapped for Euler's at the same shift."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
)

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.sana import Sana
from unirl.models.random_weights.sana import write
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class InstructedNegative(Sana):
    """The instruction stands before the negative prompt as well."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


@dataclasses.dataclass(frozen=True)
class OneShift(Sana):
    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), 3.0))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    parts = {**bundle.processors["pipeline"].components, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
    steps, output = run_pipeline(
        SanaPipeline(**parts),
        case.prompts.required_texts,
        latents,
        case,
        max_sequence_length=48,
        use_resolution_binning=False,
    )
    return [*steps], Media(images=output.images)


def family(folder: Path) -> Sana:
    return Sana(str(folder), max_sequence_length=48)


CASES = [
    Case(
        name="sana",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5),
        reference=reference,
        wrong={
            "no instruction": lambda folder: dataclasses.replace(family(folder), instruction=()),
            "an instruction before the negative prompt": lambda folder: InstructedNegative(
                str(folder), max_sequence_length=48
            ),
            "one shift": lambda folder: OneShift(str(folder), max_sequence_length=48),
        },
    )
]
