"""Lumina-Image 2.0 (arXiv 2503.21758), through diffusers' Lumina2Pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, DiffusionFamily, Facts, classifier_free
from unirl.models.pretrained import (
    check_checkpoint,
    check_size,
    decode_images,
    encode_images,
    load_pipeline,
    static_shift,
)
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Lumina2(DiffusionFamily):
    """The model's time is `1 - sigma` and its output `x0 - eps`: negated here. Text with a mask.

    The pipeline's `cfg_trunc_ratio`, which drops guidance late in a walk, is not offered.

    checkpoint:          hub id, or folder of a saved pipeline
    renormalise:         the guided velocity gets the norm of the conditional one, along the width of the latent
                         (`cfg_normalization` of the pipeline, where it is on as well)
    max_sequence_length: tokens of a prompt, with the system prompt that the pipeline puts before it
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("Alpha-VLLM/Lumina-Image-2.0",),
        parameters="2.6B",
        licence="Apache-2.0",
        guidance="classifier-free with renormalisation, off at 1; 4 is usual",
    )
    # Bare names reach the refiners of image and caption as well, blocks like all others.
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    block_names: ClassVar[tuple[str, ...]] = ("Lumina2TransformerBlock",)

    checkpoint: str
    renormalise: bool = True
    max_sequence_length: int = 256

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint, "Lumina2Pipeline")
        if self.max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be positive, got {self.max_sequence_length}")

    def load(self, device: torch.device, dtype: torch.dtype, *, frozen_dtype: torch.dtype | None = None) -> Bundle:
        """The autoencoder stays float32: it is small, and rewards look at what it draws."""
        from diffusers import Lumina2Pipeline

        if (frozen_dtype or dtype) == torch.float16:
            raise ValueError("the text encoder of Lumina2 (Gemma 2) overflows in float16; take bfloat16 or float32")
        pipeline = load_pipeline(Lumina2Pipeline, self.checkpoint, device, dtype=dtype, frozen_dtype=frozen_dtype)
        static_shift(pipeline.scheduler.config)
        frozen = {"text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
        return Bundle(transformer=pipeline.transformer, frozen=frozen, processors={"pipeline": pipeline})

    def latent_shape(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> tuple[int, ...]:
        pipeline = _pipeline(bundle)
        config, factor = pipeline.transformer.config, pipeline.vae_scale_factor
        check_size(sampling, factor * config.patch_size, largest=min(config.axes_lens[1:]))
        return config.in_channels, sampling.height // factor, sampling.width // factor

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        shift = static_shift(_pipeline(bundle).scheduler.config) if sampling.shift is None else sampling.shift
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), shift))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1]))

    def time(self, bundle: Bundle, sigma: torch.Tensor) -> torch.Tensor:
        return 1 - sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, mask, _, _ = _pipeline(bundle).encode_prompt(
            prompts.required_texts,
            do_classifier_free_guidance=False,
            device=bundle.device,
            max_sequence_length=self.max_sequence_length,
        )
        return Embedding(tokens=tokens, mask=mask.bool())

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """Without the system prompt. The pipeline encodes it beside a prompt only, so that one is encoded in vain."""
        texts = prompts.required_texts
        _, _, tokens, mask = _pipeline(bundle).encode_prompt(
            texts, negative_prompt=texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, mask=mask.bool())

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return -bundle.transformer(
            hidden_states=latents,
            timestep=step.time,
            encoder_hidden_states=embedding.tokens,
            encoder_attention_mask=embedding.mask,
            return_dict=False,
        )[0]

    def guide(
        self, conditional: torch.Tensor, unconditional: torch.Tensor, step: Step, guidance: float
    ) -> torch.Tensor:
        velocity = classifier_free(conditional, unconditional, guidance)
        if not self.renormalise:
            return velocity
        return velocity * (conditional.norm(dim=-1, keepdim=True) / velocity.norm(dim=-1, keepdim=True))

    def decode(self, bundle: Bundle, latents: torch.Tensor, sampling: DiffusionSamplingParams) -> Media:
        return decode_images(_pipeline(bundle), latents)

    def encode_media(self, bundle: Bundle, media: Media, sampling: DiffusionSamplingParams) -> torch.Tensor:
        return encode_images(_pipeline(bundle), media)


def _pipeline(bundle: Bundle) -> Any:
    """The Lumina2Pipeline; diffusers annotates less than it takes and gives."""
    return bundle.processors["pipeline"]
