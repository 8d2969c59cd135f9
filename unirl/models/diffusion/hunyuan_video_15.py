"""HunyuanVideo 1.5 (arXiv 2511.18870), text or image to video, through diffusers' HunyuanVideo15 pipelines."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, Facts
from unirl.models.diffusion.hunyuan import GlyphEmbedding, GlyphHunyuan, HunyuanFacts, averages
from unirl.models.latents import Grid
from unirl.models.sources import to_pil
from unirl.sde.steps import Step
from unirl.types.batch import dense
from unirl.types.kinds import Kind
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_Facts = partial(
    HunyuanFacts,
    makes="video",
    parameters="8.3B",
    guidance="classifier-free, off at 1; 6 is usual, 1 for the distilled",
)


@dataclasses.dataclass(frozen=True, eq=False)
class FirstFrameEmbedding(GlyphEmbedding):
    """Text, glyphs, and the picture that a video starts from.

    picture: `(N, P, D)` states of the image encoder; first_frame: `(N, C, H, W)` latent
    """

    picture: torch.Tensor | None = dense(None)
    first_frame: torch.Tensor | None = dense(None)


@dataclasses.dataclass(frozen=True)
class _HunyuanVideo15(GlyphHunyuan):
    """What both tasks share: the model's input is the latent, the latent of a first frame, and a mask of the frames."""

    kinds: ClassVar[frozenset[Kind]] = frozenset({"video"})
    published: ClassVar[Grid] = Grid(scale=16, patch=1, stride=4)
    block_names: ClassVar[tuple[str, ...]] = ("HunyuanVideo15TransformerBlock",)
    task: ClassVar[str]

    def prepare(self, pipeline: Any) -> None:
        found = pipeline.transformer.config.task_type
        if found != self.task:
            raise ValueError(f"checkpoint {self.checkpoint} is a model for {found}, this family is for {self.task}")
        GlyphHunyuan.prepare(self, pipeline)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: FirstFrameEmbedding, guidance: float
    ) -> torch.Tensor:
        frame, given = torch.zeros_like(latents), torch.zeros_like(latents[:, :1])
        if embedding.first_frame is not None:
            frame[:, :, 0], given[:, :, 0] = embedding.first_frame, 1.0
        # Zeros tell the model that there is no picture, and it masks them all: one does for the pipeline's 729.
        config = bundle.pipeline.transformer.config
        picture = embedding.tokens.new_zeros(len(latents), 1, config.image_embed_dim)
        return bundle.transformer(
            hidden_states=torch.cat([latents, frame, given], dim=1),
            timestep=step.time,
            timestep_r=self.time(bundle, step.sigma_next, tuple(latents.shape[1:])) if averages(bundle) else None,
            encoder_hidden_states=embedding.tokens,
            encoder_attention_mask=embedding.mask,
            encoder_hidden_states_2=embedding.glyphs,
            encoder_attention_mask_2=embedding.glyph_mask,
            image_embeds=picture if embedding.picture is None else embedding.picture,
            return_dict=False,
        )[0]


@dataclasses.dataclass(frozen=True)
class HunyuanVideo15(_HunyuanVideo15):
    """Text to video."""

    facts: ClassVar[Facts] = _Facts(
        checkpoints=(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled",
        ),
    )
    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanVideo15Pipeline",)
    task: ClassVar[str] = "t2v"

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> FirstFrameEmbedding:
        return FirstFrameEmbedding(**self.encode_texts(bundle, prompts.required_texts))


@dataclasses.dataclass(frozen=True)
class HunyuanVideo15I2V(_HunyuanVideo15):
    """Image to video: one source picture a prompt, scaled and cropped to the size of the video.

    The picture is an input of the model: the first frame is generated like the others.
    """

    facts: ClassVar[Facts] = _Facts(
        checkpoints=(
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_step_distilled",
        ),
        advice="step_distilled is a mean-flow model: it samples, without noise",
    )
    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanVideo15ImageToVideoPipeline",)
    task: ClassVar[str] = "i2v"

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> FirstFrameEmbedding:
        counts = [len(pictures) for pictures in prompts.sources or [[] for _ in prompts.required_texts]]
        if set(counts) != {1}:
            raise ValueError(f"image to video starts from one picture a prompt, got {counts}")
        pictures = [_encode_picture(bundle, own[0], sampling) for own in prompts.sources or []]
        states, frames = (torch.cat(rows) for rows in zip(*pictures, strict=True))
        texts = self.encode_texts(bundle, prompts.required_texts)
        return FirstFrameEmbedding(**texts, picture=states, first_frame=frames)


def _encode_picture(
    bundle: Bundle, picture: torch.Tensor, sampling: DiffusionSamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """picture: `(3, h, w)`. Its states `(1, P, D)`, and its latent `(1, C, H, W)`."""
    pipeline, size = bundle.pipeline, {"height": sampling.height, "width": sampling.width}
    image = to_pil(picture)
    image = pipeline.video_processor.resize(image, **size, resize_mode="crop")
    states = pipeline.encode_image(image, batch_size=1, device=bundle.device, dtype=pipeline.image_encoder.dtype)
    pixels = pipeline.video_processor.preprocess(image, **size)
    return states, latent_space.encode(pipeline.vae, pixels[:, :, None])[:, :, 0]
