"""Wan 2.1 and 2.2: text-to-video, image-to-video by CLIP and by a given first frame, one transformer and two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from PIL.Image import fromarray

from tests.families.case import LEAVE_OUT, TEXTS, Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.wan import Wan, Wan21, Wan21ImageToVideo, Wan22A14B, Wan22TI2V5B, WanEmbedding
from unirl.models.latents import encode
from unirl.models.random_weights import wan as random_wan
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media, to_uint8
from unirl.types.sampling import DiffusionSamplingParams

SAMPLING = DiffusionSamplingParams(steps=4, height=32, width=32, frames=9, guidance=5.0, negative_prompt="bad")
LARGE = dataclasses.replace(SAMPLING, height=64)  # 16 pixels of a latent and 2 latents of a patch
PICTURES = Media(
    texts=list(TEXTS),
    sources=[[torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(row))] for row in range(2)],
)


@dataclasses.dataclass(frozen=True)
class ShiftedOnce(Wan21):
    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), 3.0))
        return Schedule(sigmas, self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


@dataclasses.dataclass(frozen=True)
class Negated(Wan21):
    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return -super().predict(bundle, latents, step, embedding, guidance)


@dataclasses.dataclass(frozen=True)
class OneExpert(Wan22A14B):
    """The high-noise expert makes all steps."""

    def _high(self, time: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(time, dtype=torch.bool)


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(Wan22TI2V5B):
    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


@dataclasses.dataclass(frozen=True)
class OneTime(Wan22TI2V5B):
    """The given frame has the time of the others."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        alike = dataclasses.replace(embedding, weights=None, given=None)
        return super().predict(bundle, latents, step, alike, guidance)


@dataclasses.dataclass(frozen=True)
class Blind(Wan21ImageToVideo):
    """What CLIP sees of the picture is lost."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        embedding = super().encode(bundle, prompts, sampling)
        assert isinstance(embedding, WanEmbedding)
        assert embedding.picture is not None
        return dataclasses.replace(embedding, picture=torch.zeros_like(embedding.picture))


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """Row by row where there are pictures: the pipelines take one picture a call."""
    pipeline: Any = bundle.processors["pipeline"]
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0 if pipeline.config.expand_timesteps else 3.0)
    sources = case.prompts.sources
    if sources is None:
        steps, videos = _called(pipeline, case.prompts.required_texts, latents, case)
        return [*steps], Media(videos=videos)
    if "image_encoder" not in pipeline.components:
        pipeline = _as_image_to_video(pipeline)
    rows = []
    for row, (text, [picture]) in enumerate(zip(case.prompts.required_texts, sources, strict=True)):
        image = fromarray(to_uint8(picture[None])[0].numpy())
        steps, videos = _called(pipeline, [text], latents[row : row + 1], case, image=image)
        if pipeline.config.expand_timesteps:
            # The pipeline lets its first frame drift, and puts the picture in its place in forwards and at the end.
            pixels = pipeline.video_processor.preprocess(image, case.sampling.height, case.sampling.width)
            for own in steps:
                own[:, :, :1] = encode(pipeline.vae, pixels[:, :, None])
        rows.append((torch.stack(steps), videos))
    steps = torch.cat([steps for steps, _ in rows], dim=1)
    return [*steps], Media(videos=torch.cat([videos for _, videos in rows]))


def _as_image_to_video(pipeline: Any) -> Any:
    """A TI2V checkpoint is saved as a text-to-video pipeline."""
    return WanImageToVideoPipeline(**pipeline.components, expand_timesteps=pipeline.config.expand_timesteps)


def _called(
    pipeline: Any, texts: list[str], latents: torch.Tensor, case: Case, **arguments: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    # The text-to-video pipeline encodes for both: that of image-to-video needs ftfy.
    parts = {name: pipeline.components[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    negative = [case.sampling.negative_prompt] * len(texts)
    with torch.no_grad():
        positive, other = WanPipeline(**parts).encode_prompt(texts, negative, max_sequence_length=512)
    if pipeline.transformer_2 is not None:
        arguments["guidance_scale_2"] = 3.0
    embedded = {"prompt": LEAVE_OUT, "prompt_embeds": positive, "negative_prompt_embeds": other}
    steps, output = run_pipeline(
        pipeline, texts, latents, case, num_frames=case.sampling.frames, **embedded, **arguments
    )
    return steps, output.frames


def experts(folder: Path, boundary: float = 0.875) -> Wan22A14B:
    return Wan22A14B(str(folder), boundary=boundary, low_guidance=3.0)


def wrong(family: type[Wan], **settings: Any) -> Any:
    return lambda folder: family(str(folder), **settings)


CASES = [
    Case(
        name="wan 2.1",
        write=random_wan.write_text_to_video,
        family=lambda folder: Wan21(str(folder)),
        sampling=SAMPLING,
        reference=reference,
        wrong={"one shift": wrong(ShiftedOnce), "sign": wrong(Negated)},
    ),
    Case(
        name="wan 2.2 a14b",
        write=random_wan.write_experts,
        family=experts,
        sampling=SAMPLING,
        reference=reference,
        wrong={
            "one expert": wrong(OneExpert, low_guidance=3.0),
            "one guidance": wrong(Wan22A14B),
            "boundary": wrong(Wan22A14B, low_guidance=3.0, boundary=0.5),
        },
    ),
    Case(
        name="wan 2.2 a14b image",
        write=random_wan.write_experts_image_to_video,
        family=lambda folder: experts(folder, boundary=0.9),
        sampling=SAMPLING,
        reference=reference,
        prompts=PICTURES,
        wrong={"one expert": wrong(OneExpert, low_guidance=3.0)},
    ),
    Case(
        name="wan 2.2 ti2v",
        write=random_wan.write_token_times,
        family=lambda folder: Wan22TI2V5B(str(folder)),
        sampling=LARGE,
        reference=reference,
        wrong={"time is sigma": wrong(TimeIsSigma)},
    ),
    Case(
        name="wan 2.2 ti2v image",
        write=random_wan.write_token_times,
        family=lambda folder: Wan22TI2V5B(str(folder)),
        sampling=LARGE,
        reference=reference,
        prompts=PICTURES,
        wrong={"one time": wrong(OneTime)},
    ),
    Case(
        name="wan 2.1 image",
        write=random_wan.write_image_to_video,
        family=lambda folder: Wan21ImageToVideo(str(folder)),
        sampling=SAMPLING,
        reference=reference,
        prompts=PICTURES,
        wrong={"blind": wrong(Blind)},
    ),
]
