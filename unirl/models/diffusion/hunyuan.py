"""What the Hunyuan families have in common: their schedule, and how they read what a prompt quotes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid
from unirl.models.pretrained import check_count, check_euler
from unirl.models.published import JOINT_ATTENTION, PublishedFamily
from unirl.types.batch import dense
from unirl.types.condition import Embedding
from unirl.types.sampling import DiffusionSamplingParams

HunyuanFacts = partial(Facts, licence="Tencent Hunyuan Community License (not for the EU, the UK and South Korea)")


@dataclasses.dataclass(frozen=True, eq=False)
class GlyphEmbedding(Embedding):
    """Text, and apart from it the strings that a prompt quotes, read letter by letter to be drawn.

    glyphs: `(N, G, D)`; glyph_mask: `(N, G)` bool, all False where a prompt quotes nothing
    """

    glyphs: torch.Tensor | None = dense(None)
    glyph_mask: torch.Tensor | None = dense(None)


@dataclasses.dataclass(frozen=True)
class Hunyuan(PublishedFamily):
    """Velocity `eps - x0` at time `1000 sigma`; `linspace(1, 1/T, T)` with the static shift of the checkpoint.

    max_sequence_length: text tokens of a prompt; fewer save memory, in every joint attention
    """

    # Bare names: the blocks of the text refiner, which run once a forward, are trained as well.
    lora_targets: ClassVar[tuple[str, ...]] = JOINT_ATTENTION
    fps: ClassVar[float | None] = 24.0

    max_sequence_length: int = 1000

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        """Not every block of these autoencoders halves a picture."""
        return dataclasses.replace(self.published, scale=vae["spatial_compression_ratio"])

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        if averages(bundle) and (sampling.resolve_sde_indices(0) or sampling.solver != "euler"):
            raise ValueError(
                "this mean-flow checkpoint predicts the average velocity of a whole step, which says nothing of the "
                "noise level between: it takes Euler steps without noise (noise_level=0, solver=euler), "
                f"got noise_level={sampling.noise_level}, solver={sampling.solver}"
            )
        return super().sigmas(bundle, sampling)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma * bundle.pipeline.scheduler.config.num_train_timesteps

    def refuse_points(self, bundle: Bundle) -> None:
        """A mean-flow model: what it predicts for a step of no length is not what it samples with."""
        if averages(bundle):
            raise ValueError(
                f"{self.checkpoint} is a mean-flow model: it samples with the average velocity of a whole step, and a "
                "loss on single points would train another; train a checkpoint that is not distilled"
            )


@dataclasses.dataclass(frozen=True)
class GlyphHunyuan(Hunyuan):
    """A family that reads what a prompt quotes once more, letter by letter.

    max_glyphs: tokens (bytes, mostly) of that; further ones are cut off
    """

    max_glyphs: int = 256

    def __post_init__(self) -> None:
        Hunyuan.__post_init__(self)
        check_count("max_glyphs", self.max_glyphs)

    def prepare(self, pipeline: Any) -> None:
        """Give the pipeline the lengths to which it pads."""
        Hunyuan.prepare(self, pipeline)
        pipeline.tokenizer_max_length = self.max_sequence_length
        pipeline.tokenizer_2_max_length = self.max_glyphs

    def encode_texts(self, bundle: Bundle, texts: list[str]) -> dict[str, torch.Tensor]:
        """The fields of a GlyphEmbedding."""
        tokens, mask, glyphs, glyph_mask = bundle.pipeline.encode_prompt(
            texts, device=bundle.device, batch_size=len(texts)
        )
        # Where nothing is quoted, some pipelines make zeros of float32: the dtype must not depend on the batch.
        glyphs = glyphs.to(tokens.dtype)
        return {"tokens": tokens, "mask": mask.bool(), "glyphs": glyphs, "glyph_mask": glyph_mask.bool()}


def averages(bundle: Bundle) -> bool:
    """Whether the model takes the next noise level too, and predicts the velocity averaged over the step to it."""
    config = bundle.pipeline.transformer.config
    return "use_meanflow" in config and config.use_meanflow
