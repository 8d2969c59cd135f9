"""CogView4, through diffusers' CogView4Pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid
from unirl.models.pretrained import check_count, check_dynamic, ragged_embedding
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.schedule import shift_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class CogView4(PublishedFamily):
    """Velocity `eps - x0` at model times that are not shifted, at noise levels that are, by the size of the picture.

    The pipeline pads a batch of prompts on the left to the longest and on to a multiple of 16, and no mask tells the
    padding apart, neither in the text encoder nor in the transformer: a prompt's picture depends on its batch. Here
    every prompt is encoded alone, as the pipeline does with a single one, and what is added to join rows of different
    length is masked by diffusers' own training attention.

    max_sequence_length: tokens of a prompt
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("zai-org/CogView4-6B",),
        parameters="6.4B",
        licence="Apache-2.0",
        guidance="classifier-free, off at 1; 5 is usual",
        advice="no float16, it overflows",
    )
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("CogView4TransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("CogView4Pipeline",)
    published: ClassVar[Grid] = Grid(scale=8)

    max_sequence_length: int = 1024

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        return dataclasses.replace(super().grid(vae, transformer), largest=transformer["pos_embed_max_size"])

    def prepare(self, pipeline: Any) -> None:
        """The processor of inference adds its mask to the logits as ones and zeros, which masks nothing."""
        from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor

        check_dynamic(pipeline.scheduler.config, time_shift="linear")
        for block in pipeline.transformer.transformer_blocks:
            block.attn1.set_processor(CogView4TrainingAttnProcessor())

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        """Whole model times, shifted."""
        steps = bundle.pipeline.scheduler.config.num_train_timesteps
        times = torch.linspace(steps, 1, sampling.steps, dtype=torch.float64).floor()
        shift = _shift(bundle, self.latent_shape(bundle, sampling)) if sampling.shift is None else sampling.shift
        return shift_sigmas(times / steps, shift)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The shift undone that the model was trained with, at the size of the latents."""
        steps = bundle.pipeline.scheduler.config.num_train_timesteps
        return (steps * shift_sigmas(sigma.double(), 1 / _shift(bundle, shape))).float()

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        encoded = [
            bundle.pipeline.encode_prompt(
                text,
                do_classifier_free_guidance=False,
                device=bundle.device,
                max_sequence_length=self.max_sequence_length,
            )[0]
            for text in prompts.required_texts
        ]
        return ragged_embedding([row for (row,) in encoded])

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None, "rows of text have lengths of their own"
        size = torch.tensor(latents.shape[-2:], device=latents.device) * bundle.pipeline.vae_scale_factor
        sizes = size.float().expand(len(latents), 2)
        return bundle.transformer(
            hidden_states=latents,
            encoder_hidden_states=embedding.tokens,
            timestep=step.time,
            original_size=sizes,
            target_size=sizes,
            crop_coords=torch.zeros_like(sizes),
            attention_kwargs={"text_attn_mask": embedding.mask.int()},
            return_dict=False,
        )[0]


def _shift(bundle: Bundle, shape: tuple[int, ...]) -> float:
    """It grows with the square root of the tokens of a latent `(C, h, w)`."""
    config = bundle.pipeline.scheduler.config
    tokens = shape[1] * shape[2] // bundle.pipeline.transformer.config.patch_size**2
    return config.base_shift + config.max_shift * math.sqrt(tokens / config.base_image_seq_len)
