"""HunyuanImage 2.1, with classifier-free and with projected guidance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.families.case import LEAVE_OUT, Case, run_pipeline
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.hunyuan_image import HunyuanImage
from unirl.models.random_weights.hunyuan_image import write
from unirl.sde.schedule import pin, uniform_sigmas
from unirl.sde.steps import Schedule
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTHS: dict[str, Any] = {"max_sequence_length": 64, "max_glyphs": 24}
TEXTS = ["a red cat", 'two blue dogs beside a sign that says "woof"']
SAMPLING = DiffusionSamplingParams(steps=4, height=16, width=32, guidance=3.5)
# Of the four noise levels 1, 0.9375, 0.8333 and 0.625 the last two: after step 1.
PROJECTED: dict[str, Any] = {"apg_below": 0.9, "apg_threshold": 1.0}


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(HunyuanImage):
    """The model time is not scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


@dataclasses.dataclass(frozen=True)
class SwappedBranches(HunyuanImage):
    """The unconditional branch takes the place of the conditional one."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class NoShift(HunyuanImage):
    """The grid of the schedule, not shifted."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(uniform_sigmas(sampling.steps))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """Classifier-free guidance at every step."""
    return run(bundle, latents, case, adaptive_projected_guidance_start_step=case.sampling.steps)


def projected_reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    settings = {
        "adaptive_projected_guidance_start_step": 1,
        "adaptive_projected_guidance_momentum": None,
        "adaptive_projected_guidance_rescale": PROJECTED["apg_threshold"],
    }
    return run(bundle, latents, case, **settings)


def run(bundle: Bundle, latents: torch.Tensor, case: Case, **guider: Any) -> tuple[list[torch.Tensor | None], Media]:
    pipeline, texts = bundle.processors["pipeline"], case.prompts.required_texts
    pipeline.guider = pipeline.guider.new(guidance_scale=case.sampling.guidance, **guider)
    steps, output = run_pipeline(
        pipeline, texts, latents, case, guidance_scale=LEAVE_OUT, negative_prompt=[""] * len(texts)
    )
    return [*steps], Media(images=output.images)


def wide(folder: Path) -> HunyuanImage:
    return HunyuanImage(str(folder), **LENGTHS)


CASES = [
    Case(
        name="hunyuan_image",
        write=write,
        family=wide,
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=list(TEXTS)),
        wrong={
            "time is sigma": lambda folder: TimeIsSigma(str(folder), **LENGTHS),
            "branches swapped": lambda folder: SwappedBranches(str(folder), **LENGTHS),
            "no shift": lambda folder: NoShift(str(folder), **LENGTHS),
        },
    ),
    Case(
        name="hunyuan_image projected",
        write=write,
        family=lambda folder: HunyuanImage(str(folder), **LENGTHS, **PROJECTED),
        sampling=SAMPLING,
        reference=projected_reference,
        prompts=Media(texts=list(TEXTS)),
        wrong={
            "not projected": wide,
            "one step too early": lambda folder: HunyuanImage(str(folder), **LENGTHS, **{**PROJECTED, "apg_below": 1}),
            "not shortened": lambda folder: HunyuanImage(str(folder), **LENGTHS, **{**PROJECTED, "apg_threshold": 1e3}),
        },
    ),
]
