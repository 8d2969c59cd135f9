"""CogView4, through diffusers' CogView4Pipeline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts
from unirl.models.pretrained import (
    check_checkpoint,
    check_euler,
    check_size,
    decode_images,
    encode_images,
    load_pipeline,
    ragged_embedding,
)
from unirl.sde.schedule import pin, shift_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class CogView4(DiffusionFamily):
    """Velocity `eps - x0` at whole model times that are not shifted, at noise levels that are.

    The pipeline pads a batch of prompts on the left to the longest and on to a multiple of 16, and no mask tells the
    padding apart, neither in the text encoder nor in the transformer: a prompt's picture depends on its batch. Here
    every prompt is encoded alone, as the pipeline does with a single one, and what is added to join rows of different
    length is masked by diffusers' own training attention.

    checkpoint:          hub id, or folder of a saved pipeline
    max_sequence_length: tokens of a prompt
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("zai-org/CogView4-6B",),
        parameters="6.4B",
        licence="Apache-2.0",
        guidance="classifier-free, off at 1; 5 is usual",
        advice="no float16, it overflows; trains on its own samples, not on given pictures (SFT)",
    )
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    block_names: ClassVar[tuple[str, ...]] = ("CogView4TransformerBlock",)

    checkpoint: str
    max_sequence_length: int = 1024

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "CogView4Pipeline")
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be positive, got {self.max_sequence_length}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import CogView4Pipeline
        from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor

        pipeline = load_pipeline(CogView4Pipeline, self.checkpoint, device, dtype=dtype, frozen_dtype=frozen_dtype)
        check_euler(pipeline.scheduler.config, "use_dynamic_shifting", time_shift="linear")
        if not pipeline.scheduler.config.use_dynamic_shifting:
            raise ValueError(
                "CogView4's schedule shifts by the size of the picture, the checkpoint's scheduler does not"
            )
        # The processor of inference adds its mask to the logits as ones and zeros, which masks nothing.
        for block in pipeline.transformer.transformer_blocks:
            block.attn1.set_processor(CogView4TrainingAttnProcessor())
        frozen = {"text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
        return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = _pipeline(bundle)
        config, factor = pipeline.transformer.config, pipeline.vae_scale_factor
        check_size(sampling, factor * config.patch_size, largest=config.pos_embed_max_size)
        return config.in_channels, sampling.height // factor, sampling.width // factor

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        pipeline = _pipeline(bundle)
        config, cell = pipeline.scheduler.config, pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        tokens = (sampling.height // cell) * (sampling.width // cell)
        growth = math.sqrt(tokens / config.base_image_seq_len)
        shift = config.base_shift + config.max_shift * growth if sampling.shift is None else sampling.shift
        times = torch.linspace(config.num_train_timesteps, 1, sampling.steps, dtype=torch.float64).floor()
        sigmas = pin(shift_sigmas(times / config.num_train_timesteps, shift))
        return Schedule(sigmas=sigmas, times=times.float())

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        """Refused: the shift between noise level and model time grows with the picture, which is not known here."""
        raise ValueError(
            "CogView4's model time depends on the size of the picture, which losses at arbitrary noise levels (SFT) do "
            "not tell; train it on its own samples"
        )

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        encoded = [
            _pipeline(bundle).encode_prompt(
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
        size = torch.tensor(latents.shape[-2:], device=latents.device) * _pipeline(bundle).vae_scale_factor
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

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        return decode_images(_pipeline(bundle), latents)

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        return encode_images(_pipeline(bundle), media)


def _pipeline(bundle: Bundle) -> Any:
    """The CogView4Pipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]
