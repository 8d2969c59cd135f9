"""Krea 2, undistilled and distilled."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.krea2 import Krea2
from unirl.models.random_weights.krea2 import write
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 64


@dataclasses.dataclass(frozen=True)
class KreasOwnScale(Krea2):
    """The scale is taken for Krea's own number, which is one less."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance + 1)


@dataclasses.dataclass(frozen=True)
class TimeOfThousands(Krea2):
    """The model time is scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return 1000 * sigma


@dataclasses.dataclass(frozen=True)
class StaticShift(Krea2):
    """The schedule of another family."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        return super().schedule(bundle, dataclasses.replace(sampling, shift=3.5))


@dataclasses.dataclass(frozen=True)
class NoMask(Krea2):
    """Padding passes for text."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, dataclasses.replace(embedding, mask=None), guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline = bundle.processors["pipeline"]
    count, channels, height, width = latents.shape
    steps, output = run_pipeline(
        pipeline,
        case.prompts.required_texts,
        pipeline._pack_latents(latents, count, channels, height, width),
        case,
        guidance_scale=case.sampling.guidance - 1,
        max_sequence_length=LENGTH,
    )
    size = (case.sampling.height, case.sampling.width)
    return [pipeline._unpack_latents(step, *size)[:, :, 0] for step in steps], Media(images=output.images)


def family(folder: Path) -> Krea2:
    return Krea2(str(folder), max_sequence_length=LENGTH)


SAMPLING = DiffusionSamplingParams(steps=4, height=64, width=32, guidance=5.5)

CASES = [
    Case(
        name="krea2",
        write=write,
        family=family,
        sampling=SAMPLING,
        reference=reference,
        wrong={
            "krea's own scale": lambda folder: KreasOwnScale(str(folder), max_sequence_length=LENGTH),
            "time of thousands": lambda folder: TimeOfThousands(str(folder), max_sequence_length=LENGTH),
            "static shift": lambda folder: StaticShift(str(folder), max_sequence_length=LENGTH),
            "no mask": lambda folder: NoMask(str(folder), max_sequence_length=LENGTH),
        },
    ),
    Case(
        name="krea2 distilled",
        write=lambda folder: write(folder, distilled=True),
        family=family,
        sampling=dataclasses.replace(SAMPLING, guidance=1.0),
        reference=reference,
        wrong={"static shift": lambda folder: StaticShift(str(folder), max_sequence_length=LENGTH)},
    ),
]
