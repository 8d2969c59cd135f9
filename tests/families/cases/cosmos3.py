"""Cosmos 3 text-to-image."""

from __future__ import annotations

import dataclasses

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
)

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.cosmos3 import Cosmos3
from unirl.models.random_weights.cosmos3 import SHIFT, write
from unirl.sde.steps import Schedule
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """One sample a call, on Euler's scheduler: UniPC walks another way."""
    pipeline = bundle.processors["pipeline"]
    published = pipeline.scheduler
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    walks, pictures = [], []
    for text, x in zip(case.prompts.required_texts, latents[:, None, :, None], strict=True):
        steps, output = run_pipeline(
            pipeline, [text], x, case, num_frames=1, negative_prompt=case.sampling.negative_prompt
        )
        walks.append([step[:, :, 0] for step in steps])
        pictures.append(output.video)
    pipeline.scheduler = published
    together: list[torch.Tensor | None] = [torch.cat(rows) for rows in zip(*walks, strict=True)]
    return together, Media(images=torch.cat(pictures))


@dataclasses.dataclass(frozen=True)
class NoShift(Cosmos3):
    """The schedule is not shifted."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        return super().schedule(bundle, dataclasses.replace(sampling, shift=1.0))


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(Cosmos3):
    """The model time is not scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


@dataclasses.dataclass(frozen=True)
class SizeNotNegated(Cosmos3):
    """The unconditional branch is encoded as a prompt is."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


CASES = [
    Case(
        name="cosmos3",
        write=write,
        family=lambda folder: Cosmos3(str(folder)),
        # An odd number of latent columns: the last patch is half padding.
        sampling=DiffusionSamplingParams(steps=4, height=64, width=48, guidance=6.0, negative_prompt="a blurred one"),
        reference=reference,
        wrong={
            "no shift": lambda folder: NoShift(str(folder)),
            "time is sigma": lambda folder: TimeIsSigma(str(folder)),
            "size not negated": lambda folder: SizeNotNegated(str(folder)),
        },
    )
]
