"""Lumina-Image 2.0 (arXiv 2503.21758), through diffusers' Lumina2Pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts, Point, classifier_free
from unirl.models.latents import Grid
from unirl.models.pretrained import check_count, check_euler
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Lumina2(PublishedFamily):
    """The model's time is `1 - sigma` and its output `x0 - eps`: negated here. Text with a mask.

    The pipeline's `cfg_trunc_ratio`, which drops guidance late in a walk, is not offered.

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
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    block_names: ClassVar[tuple[str, ...]] = ("Lumina2TransformerBlock",)
    pipelines: ClassVar[tuple[str, ...]] = ("Lumina2Pipeline",)
    published: ClassVar[Grid] = Grid(scale=8)
    overflows: ClassVar[bool] = True

    renormalise: bool = True
    max_sequence_length: int = 256

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length)

    def grid(self, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Grid:
        return dataclasses.replace(super().grid(vae, transformer), largest=min(transformer["axes_lens"][1:]))

    def prepare(self, pipeline: Any) -> None:
        check_euler(pipeline.scheduler.config)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return 1 - sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens, mask, _, _ = bundle.pipeline.encode_prompt(
            prompts.required_texts,
            do_classifier_free_guidance=False,
            device=bundle.device,
            max_sequence_length=self.max_sequence_length,
        )
        return Embedding(tokens=tokens, mask=mask.bool())

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """Without the system prompt. The pipeline encodes it beside a prompt only, so that one is encoded in vain."""
        texts = prompts.required_texts
        _, _, tokens, mask = bundle.pipeline.encode_prompt(
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

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        velocity = classifier_free(conditional, unconditional, at.guidance)
        if not self.renormalise:
            return velocity
        return velocity * (conditional.norm(dim=-1, keepdim=True) / velocity.norm(dim=-1, keepdim=True))
