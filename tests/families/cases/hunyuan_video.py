"""HunyuanVideo: guidance as an input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.hunyuan_video import HunyuanVideo
from unirl.models.random_weights.hunyuan_video import write
from unirl.sde.schedule import pin, twice_shifted_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 64


@dataclasses.dataclass(frozen=True)
class GuidanceUnscaled(HunyuanVideo):
    """The model is given 6, not 6000."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, embedding, guidance / 1000)


@dataclasses.dataclass(frozen=True)
class PaddingSeen(HunyuanVideo):
    """The model attends to the padding of short prompts."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None
        full = dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))
        return super().predict(bundle, latents, step, full, guidance)


@dataclasses.dataclass(frozen=True)
class SchedulersOwnTable(HunyuanVideo):
    """The table that the scheduler makes without being given sigmas: shifted twice."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(twice_shifted_sigmas(sampling.steps, 7.0))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    steps, output = run_pipeline(
        bundle.processors["pipeline"],
        case.prompts.required_texts,
        latents,
        case,
        num_frames=case.sampling.frames,
        max_sequence_length=LENGTH,
    )
    return [*steps], Media(videos=output.frames)


def family(folder: Path) -> HunyuanVideo:
    return HunyuanVideo(str(folder), LENGTH)


CASES = [
    Case(
        name="hunyuan_video",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=48, frames=9, guidance=6.0),
        reference=reference,
        wrong={
            "guidance unscaled": lambda folder: GuidanceUnscaled(str(folder), LENGTH),
            "padding seen": lambda folder: PaddingSeen(str(folder), LENGTH),
            "scheduler's own table": lambda folder: SchedulersOwnTable(str(folder), LENGTH),
        },
    )
]
