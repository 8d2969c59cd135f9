"""HunyuanVideo 1.5 from texts, of which one quotes something to be drawn, and from pictures."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from PIL import Image

from tests.families.case import Case
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.hunyuan_video_15 import FirstFrameEmbedding, HunyuanVideo15, HunyuanVideo15I2V
from unirl.models.random_weights.hunyuan_video_15 import write
from unirl.sde.steps import Step
from unirl.types.media import Media, to_uint8
from unirl.types.sampling import DiffusionSamplingParams

LENGTHS = (64, 24)  # of the text, and of what it quotes
TEXTS = ["a red cat", 'two blue dogs beside a sign that says "woof"']


@dataclasses.dataclass(frozen=True)
class SwappedBranches(HunyuanVideo15):
    """The unconditional branch takes the place of the conditional one."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class GlyphsUnread(HunyuanVideo15):
    """What a prompt quotes is masked away."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: FirstFrameEmbedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.glyph_mask is not None
        blind = dataclasses.replace(embedding, glyph_mask=torch.zeros_like(embedding.glyph_mask))
        return super().predict(bundle, latents, step, blind, guidance)


@dataclasses.dataclass(frozen=True)
class FirstFrameUnmarked(HunyuanVideo15I2V):
    """The latent of the first frame is left out."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: FirstFrameEmbedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, dataclasses.replace(embedding, first_frame=None), guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """Row by row where there are pictures: the pipeline takes one a call."""
    pipeline, texts = bundle.processors["pipeline"], case.prompts.required_texts
    sampling = case.sampling
    pipeline.guider = pipeline.guider.new(guidance_scale=sampling.guidance)
    settings: dict[str, Any] = {"num_frames": sampling.frames, "num_inference_steps": sampling.steps}
    if case.prompts.sources is None:
        pipeline.vision_num_semantic_tokens = 3  # of 729, which are all masked
        size = {"height": sampling.height, "width": sampling.width, "negative_prompt": [""] * len(texts)}
        steps, videos = run(pipeline, prompt=texts, latents=latents, **size, **settings)
        return [*steps], Media(videos=videos)
    rows = []
    for text, (picture,), noise in zip(texts, case.prompts.sources, latents, strict=True):
        image = Image.fromarray(to_uint8(picture[None])[0].numpy())
        own = {"prompt": [text], "negative_prompt": [""], "image": image, "latents": noise[None]}
        rows.append(run(pipeline, **own, **settings))
    steps = [torch.cat(step) for step in zip(*(steps for steps, _ in rows), strict=True)]
    return [*steps], Media(videos=torch.cat([videos for _, videos in rows]))


def run(pipeline: Any, **settings: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The pipeline has no callback: its scheduler tells the latents after each step."""
    steps, step = [], pipeline.scheduler.step

    def keep(*arguments: Any, **named: Any) -> tuple[torch.Tensor]:
        steps.append(step(*arguments, **named)[0])
        return (steps[-1],)

    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler.step = keep
    try:
        with torch.no_grad():
            return steps, pipeline(**settings, output_type="pt").frames
    finally:
        pipeline.scheduler.step = step


def pictures() -> list[list[torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return [[torch.rand(3, side, side, generator=draws)] for side in (20, 16)]


SAMPLING = DiffusionSamplingParams(steps=4, height=16, width=16, frames=5, guidance=6.0)
# The last block reads its text stream and does not write it.
SILENT = ("transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.attn.add_q_proj")

CASES = [
    Case(
        name="hunyuan_video_15",
        write=write,
        family=lambda folder: HunyuanVideo15(str(folder), *LENGTHS),
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=list(TEXTS)),
        silent=SILENT,
        wrong={
            "branches swapped": lambda folder: SwappedBranches(str(folder), *LENGTHS),
            "glyphs unread": lambda folder: GlyphsUnread(str(folder), *LENGTHS),
        },
    ),
    Case(
        name="hunyuan_video_15 i2v",
        write=partial(write, task="i2v"),
        family=lambda folder: HunyuanVideo15I2V(str(folder), *LENGTHS),
        sampling=SAMPLING,
        reference=reference,
        prompts=Media(texts=list(TEXTS), sources=pictures()),
        silent=SILENT,
        wrong={"first frame unmarked": lambda folder: FirstFrameUnmarked(str(folder), *LENGTHS)},
    ),
]
