"""Z-Image, without and with a bound on the guided velocity. Its pipeline counts guidance from 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from tests.families.case import Case, Reference, run_pipeline
from unirl.models.base import Bundle, DiffusionFamily, Point
from unirl.models.diffusion.z_image import ZImage
from unirl.models.random_weights.z_image import write
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 128  # tokens of a prompt: one a byte, and the chat template


@dataclasses.dataclass(frozen=True)
class PipelinesGuidance(ZImage):
    """The number is taken as the pipeline takes it."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(conditional, unconditional, dataclasses.replace(at, guidance=at.guidance + 1))


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(ZImage):
    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


def family(folder: Path) -> ZImage:
    return ZImage(str(folder), max_sequence_length=LENGTH)


def bounded(folder: Path) -> ZImage:
    return dataclasses.replace(family(folder), norm_limit=0.9)


def reference(norm_limit: float | bool) -> Reference:
    def run(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
        steps, output = run_pipeline(
            bundle.processors["pipeline"],
            case.prompts.required_texts,
            latents,
            case,
            guidance_scale=case.sampling.guidance - 1,
            cfg_normalization=norm_limit,
            max_sequence_length=LENGTH,
        )
        return [*steps], Media(images=output.images)

    return run


SAMPLING = DiffusionSamplingParams(steps=4, height=24, width=32, guidance=4.0)  # 48 tokens: 16 are padding
WRONG: dict[str, Callable[[Path], DiffusionFamily]] = {
    "guidance as the pipeline counts it": lambda folder: PipelinesGuidance(str(folder), max_sequence_length=LENGTH),
    "time is sigma": lambda folder: TimeIsSigma(str(folder), max_sequence_length=LENGTH),
}
CASES = [
    Case("z_image", write, family, SAMPLING, reference(norm_limit=False), wrong=WRONG),
    Case(
        "z_image bounded", write, bounded, SAMPLING, reference(norm_limit=0.9), wrong={"no bound on the norm": family}
    ),
]
