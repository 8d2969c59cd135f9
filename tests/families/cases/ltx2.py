"""LTX-2: both streams at every step, and what is seen and heard at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.ltx2 import LTX2
from unirl.models.random_weights.ltx2 import write
from unirl.sde.steps import Schedule
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 64
RATE = 24.0


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline, sampling = bundle.processors["pipeline"], case.sampling
    embedding = family(Path(pipeline.name_or_path)).encode(bundle, case.prompts, sampling)
    video, audio = embedding.streams(latents)
    _, frames, height, width = embedding.video_shape
    steps: list[torch.Tensor | None] = []

    def keep(_: Any, __: int, ___: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen = pipeline._unpack_latents(state["latents"], frames, height, width)
        heard = pipeline._unpack_audio_latents(state["audio_latents"], *embedding.audio_shape[1:])
        steps.append(torch.cat([seen.flatten(1), heard.flatten(1)], dim=1))
        return {}

    pipeline._callback_tensor_inputs = ["latents", "audio_latents"]
    statistics = (pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    _, output = run_pipeline(
        pipeline,
        case.prompts.required_texts,
        pipeline._pack_latents(video),
        case,
        # The pipeline takes what an autoencoder gives, and normalises it.
        audio_latents=pipeline._denormalize_audio_latents(pipeline._pack_audio_latents(audio), *statistics),
        negative_prompt=[sampling.negative_prompt] * len(video),
        num_frames=sampling.frames,
        frame_rate=RATE,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        max_sequence_length=LENGTH,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    return steps, Media(videos=output.frames, fps=RATE, audio=output.audio, audio_rate=16000)


@dataclasses.dataclass(frozen=True)
class GuidedVelocity(LTX2):
    """Guidance in the space of velocities, and no look at x_0."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance)


@dataclasses.dataclass(frozen=True)
class NoTerminal(LTX2):
    """The schedule ends where its shift ends."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        pinned = super().schedule(bundle, sampling)
        gaps = (1 - pinned.sigmas[:-1]) / 0.9
        sigmas = torch.cat([1 - gaps * 0.95, torch.zeros(1)])
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def family(folder: Path) -> LTX2:
    return LTX2(str(folder), max_sequence_length=LENGTH)


CASES = [
    Case(
        name="ltx2",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(
            steps=4, height=64, width=32, frames=5, guidance=3.0, negative_prompt="a blurred one"
        ),
        reference=reference,
        wrong={
            "the video's scale for both": lambda folder: dataclasses.replace(family(folder), audio_guidance=None),
            "no rescaling": lambda folder: dataclasses.replace(family(folder), guidance_rescale=0.0),
            "guided velocity": lambda folder: GuidedVelocity(str(folder), max_sequence_length=LENGTH),
            "another frame rate": lambda folder: dataclasses.replace(family(folder), frame_rate=24.5),
            "another terminal": lambda folder: NoTerminal(str(folder), max_sequence_length=LENGTH),
        },
    )
]
