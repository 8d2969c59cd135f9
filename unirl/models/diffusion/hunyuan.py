"""What the Hunyuan families have in common: how they load, their schedule, the shape of videos."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily
from unirl.models.pretrained import check_checkpoint, check_euler, resolve
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule
from unirl.types.batch import dense
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# Bare names: the blocks of the text refiner, which run once a forward, are trained as well.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LICENCE = "Tencent Hunyuan Community License (not for the EU, the UK and South Korea)"
_FPS = 24.0


@dataclasses.dataclass(frozen=True, eq=False)
class GlyphEmbedding(Embedding):
    """Text, and apart from it the strings that a prompt quotes, read letter by letter to be drawn.

    glyphs: `(N, G, D)`; glyph_mask: `(N, G)` bool, all False where a prompt quotes nothing
    """

    glyphs: torch.Tensor | None = dense(None)
    glyph_mask: torch.Tensor | None = dense(None)


@dataclasses.dataclass(frozen=True)
class Hunyuan(DiffusionFamily):
    """Velocity `eps - x0` at time `1000 sigma`; `linspace(1, 1/T, T)` with the static shift of the checkpoint.

    checkpoint:          hub id, or folder of a saved pipeline
    max_sequence_length: text tokens of a prompt; fewer save memory, in every joint attention
    """

    pipeline_class: ClassVar[str]

    checkpoint: str
    max_sequence_length: int = 1000

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, self.pipeline_class)
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be at least 1, got {self.max_sequence_length}")

    @abstractmethod
    def prepare(self, pipeline: Any) -> None:
        """Refuse a checkpoint that is of another kind, and adjust the pipeline."""

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: rewards look at what it draws."""
        import diffusers

        dtypes = {"default": frozen_dtype or dtype, "transformer": dtype, "vae": torch.float32}
        source = resolve(self.checkpoint)
        pipeline = getattr(diffusers, self.pipeline_class).from_pretrained(source, dtype=dtypes).to(device)
        check_euler(pipeline.scheduler.config)
        self.prepare(pipeline)
        pipeline.vae.enable_slicing()
        modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
        return Bundle(transformer=modules.pop("transformer"), frozen=modules, processors={"pipeline": pipeline})

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        if averages(bundle) and (sampling.resolve_sde_indices(0) or sampling.solver != "euler"):
            raise ValueError(
                "this mean-flow checkpoint predicts the average velocity of a whole step, which says nothing of the "
                "noise level between: it takes Euler steps without noise (noise_level=0, solver=euler), "
                f"got noise_level={sampling.noise_level}, solver={sampling.solver}"
            )
        config = pipeline_of(bundle).scheduler.config
        shift = config.shift if sampling.shift is None else sampling.shift
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), shift))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return sigma * pipeline_of(bundle).scheduler.config.num_train_timesteps

    def refuse_points(self, bundle: Bundle) -> None:
        """A mean-flow model: what it predicts for a step of no length is not what it samples with."""
        if averages(bundle):
            raise ValueError(
                f"{self.checkpoint} is a mean-flow model: it samples with the average velocity of a whole step, and a "
                "loss on single points would train another; train a checkpoint that is not distilled"
            )

    def save(self, bundle: Bundle, folder: Path) -> None:
        pipeline_of(bundle).save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class GlyphHunyuan(Hunyuan):
    """A family that reads what a prompt quotes once more, letter by letter.

    max_glyphs: tokens (bytes, mostly) of that; further ones are cut off
    """

    max_glyphs: int = 256

    def __post_init__(self) -> None:
        Hunyuan.__post_init__(self)
        if self.max_glyphs < 1:
            raise ValueError(f"max_glyphs must be at least 1, got {self.max_glyphs}")

    def limit_lengths(self, pipeline: Any) -> None:
        """Give the pipeline the lengths to which it pads."""
        pipeline.tokenizer_max_length = self.max_sequence_length
        pipeline.tokenizer_2_max_length = self.max_glyphs

    def encode_texts(self, bundle: Bundle, texts: list[str]) -> dict[str, torch.Tensor]:
        """The fields of a GlyphEmbedding."""
        tokens, mask, glyphs, glyph_mask = pipeline_of(bundle).encode_prompt(
            texts, device=bundle.device, batch_size=len(texts)
        )
        # Where nothing is quoted, some pipelines make zeros of float32: the dtype must not depend on the batch.
        glyphs = glyphs.to(tokens.dtype)
        return {"tokens": tokens, "mask": mask.bool(), "glyphs": glyphs, "glyph_mask": glyph_mask.bool()}


def pipeline_of(bundle: Bundle) -> Any:
    """The diffusers pipeline, which annotates less than it takes and gives."""
    return bundle.processors["pipeline"]


def averages(bundle: Bundle) -> bool:
    """Whether the model takes the next noise level too, and predicts the velocity averaged over the step to it."""
    config = pipeline_of(bundle).transformer.config
    return "use_meanflow" in config and config.use_meanflow


def nearest_sides(sampling: DiffusionSamplingParams, cell: int) -> tuple[int, int]:
    """Height and width in multiples of `cell` pixels that are next to those asked for."""
    height, width = (max(round(side / cell), 1) * cell for side in (sampling.height, sampling.width))
    return height, width


def video_shape(bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
    """`(C, F, H, W)` of a video's latent; the first frame has a latent frame of its own."""
    pipeline = pipeline_of(bundle)
    factor, stride = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
    cell = factor * pipeline.transformer.config.patch_size
    wanted = (sampling.frames, sampling.height, sampling.width)
    nearest = (1 + round((sampling.frames - 1) / stride) * stride, *nearest_sides(sampling, cell))
    if wanted != nearest:
        raise ValueError(
            f"this model makes 1 + a multiple of {stride} frames, of multiples of {cell} pixels, asked for "
            f"{wanted[0]} of {wanted[1]} x {wanted[2]}; the nearest is {nearest[0]} of {nearest[1]} x {nearest[2]}"
        )
    latent_frames = (sampling.frames - 1) // stride + 1
    return pipeline.vae.config.latent_channels, latent_frames, sampling.height // factor, sampling.width // factor


def decode_videos(bundle: Bundle, latents: torch.Tensor) -> Media:
    pipeline = pipeline_of(bundle)
    decoded = pipeline.vae.decode(latents.float() / pipeline.vae.config.scaling_factor, return_dict=False)[0]
    videos = pipeline.video_processor.postprocess_video(decoded, output_type="pt")
    return Media(videos=videos.float().cpu(), fps=_FPS)


def encode_videos(bundle: Bundle, media: Media) -> torch.Tensor:
    """The mode of the autoencoder's posterior, not a draw: the same video is the same latent."""
    assert media.videos is not None, "supervised training of this family needs videos"
    vae = pipeline_of(bundle).vae
    pixels = media.videos.to(bundle.device, torch.float32).transpose(1, 2) * 2 - 1
    return vae.encode(pixels, return_dict=False)[0].mode() * vae.config.scaling_factor
