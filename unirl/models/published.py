"""What a family with a pipeline in diffusers need not write: load, sizes, Euler's schedule, decode and encode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from unirl.models import latents as latent_space
from unirl.models.base import Bundle, DiffusionFamily
from unirl.models.latents import Grid
from unirl.models.pretrained import check_checkpoint, euler_sigmas, is_random, pipeline_name, resolve, saved_config
from unirl.sde.schedule import pin, uniform_sigmas
from unirl.sde.steps import Schedule
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# LoRA targets: the projections of an attention, and of one in which a text stream has its own.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT_ATTENTION = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@dataclasses.dataclass(frozen=True)
class PublishedFamily(DiffusionFamily):
    """checkpoint: hub id, or folder of a saved pipeline of diffusers"""

    # Class names of pipelines, of which a checkpoint holds one.
    pipelines: ClassVar[tuple[str, ...]]
    # The sizes that the published checkpoints make; a folder may hold other weights (`grid`).
    published: ClassVar[Grid]
    # Small parts that rewards look at, or listen to, what they make.
    float32: ClassVar[tuple[str, ...]] = ("vae",)
    # Whether the text encoder's activations leave the range of float16.
    overflows: ClassVar[bool] = False
    # Frames a second of its videos.
    fps: ClassVar[float | None] = None

    checkpoint: str

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, *self.pipelines)

    def check(self, prompts: Iterable[str], sampling: DiffusionSamplingParams) -> None:
        """The size, as far as it is known: a folder says which ones it makes, a hub id stands for what is published."""
        if is_random(self.checkpoint):
            return  # its folder may not be written yet, and tells when it is loaded
        folder = Path(self.checkpoint)
        if folder.is_dir():
            self.grid(saved_config(folder, "vae"), saved_config(folder, "transformer")).check(sampling)
        else:
            self.published.check(sampling)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        """The sizes that a checkpoint makes, by the configs of its parts.

        Most autoencoders halve a picture between their blocks; those without such a list have one scale in a family.
        """
        if "block_out_channels" not in vae:
            return self.published
        return dataclasses.replace(self.published, scale=2 ** (len(vae["block_out_channels"]) - 1))

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        frozen = frozen_dtype or dtype
        return self.bundled(self.loaded(device, {"default": frozen, "transformer": dtype}))

    def loaded(self, device: torch.device, dtypes: dict[str, torch.dtype]) -> Any:
        """The pipeline on `device`. dtypes: by part, and `default`; those of `float32` stay in that.

        The autoencoder works on one sample at a time: the memory of a batch is that of one, and no sample depends on
        its batch.
        """
        if self.overflows and dtypes["default"] == torch.float16:
            name = type(self).__name__
            raise ValueError(f"the text encoder of {name} overflows in float16; take bfloat16 or float32")
        import diffusers

        found = pipeline_name(self.checkpoint, *self.pipelines)
        dtypes = {**dtypes, **dict.fromkeys(self.float32, torch.float32)}
        pipeline_class = getattr(diffusers, found)
        pipeline = pipeline_class.from_pretrained(resolve(self.checkpoint), dtype=dtypes, **self.parts()).to(device)
        pipeline.vae.enable_slicing()
        self.prepare(pipeline)
        return pipeline

    def parts(self) -> dict[str, Any]:
        """Parts of the pipeline that it would not load by itself as they are wanted; None leaves one out."""
        return {}

    def prepare(self, pipeline: Any) -> None:
        """ValueError for a checkpoint of another kind; adjust the pipeline."""

    def bundled(self, pipeline: Any) -> Bundle:
        """The Bundle of a loaded pipeline: all its modules, of which the transformer is trained."""
        parts = sorted(pipeline.components.items())
        modules = {name: part for name, part in parts if isinstance(part, torch.nn.Module)}
        return Bundle(modules.pop("transformer"), frozen=modules, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        grid = self.grid_of(bundle)
        grid.check(sampling)
        return latent_space.channels(bundle.pipeline.vae), *grid.shape(sampling)

    def grid_of(self, bundle: Bundle) -> Grid:
        """The sizes that a loaded model makes."""
        return self.grid(bundle.pipeline.vae.config, bundle.pipeline.transformer.config)

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(self.sigmas(bundle, sampling))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """Noise levels `(T,)` in float64: what the config of an Euler scheduler makes of `linspace(1, 1/T, T)`."""
        config, tokens = bundle.pipeline.scheduler.config, self.grid_of(bundle).tokens(sampling)
        return euler_sigmas(config, uniform_sigmas(sampling.steps), tokens, sampling.shift)

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        pixels = latent_space.decode(bundle.pipeline.vae, latents)
        return Media(images=pixels) if pixels.ndim == 4 else Media(videos=pixels.transpose(1, 2), fps=self.fps)

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        given = latent_space.given_pictures if self.published.stride is None else latent_space.given_videos
        return latent_space.encode(bundle.pipeline.vae, given(media))
