"""Krea 2, through diffusers' Krea2Pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from unirl.models.base import Bundle, Facts
from unirl.models.latents import Grid, pack, unpack
from unirl.models.pretrained import check_count, check_dynamic
from unirl.models.published import ATTENTION, PublishedFamily
from unirl.sde.schedule import exponential_shift, uniform_sigmas
from unirl.sde.steps import Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

_DISTILLED_MU = 1.15


@dataclasses.dataclass(frozen=True)
class Krea2(PublishedFamily):
    """Velocity `eps - x0` at time sigma; text as the states of several encoder layers, padded to one length, masked.

    Guidance is the usual scale, as in classifier_free: Krea's own number is one less (its 4.5 is 5.5 here, its 0 is 1).

    max_sequence_length: text tokens of a prompt, which take 61 kB each in bfloat16
    """

    facts: ClassVar[Facts] = Facts(
        makes="image",
        checkpoints=("krea/Krea-2-Raw", "krea/Krea-2-Turbo"),
        parameters="12.8B",
        licence="Krea 2 Community License",
        gated=True,
        guidance="classifier-free, off at 1; 5.5 for Raw (Krea's own 4.5), 1 for Turbo",
        advice="Raw is an undistilled checkpoint that was published for post-training",
    )
    # Bare names: the text fusion, which runs once a forward, is trained as well.
    lora_targets: ClassVar[tuple[str, ...]] = (*ATTENTION, "to_gate", "ff.gate", "ff.up", "ff.down")
    block_names: ClassVar[tuple[str, ...]] = ("Krea2TransformerBlock", "Krea2TextFusionBlock")
    pipelines: ClassVar[tuple[str, ...]] = ("Krea2Pipeline",)
    published: ClassVar[Grid] = Grid(scale=8)

    max_sequence_length: int = 512

    def __post_init__(self) -> None:
        PublishedFamily.__post_init__(self)
        check_count("max_sequence_length", self.max_sequence_length)

    def prepare(self, pipeline: Any) -> None:
        """How many tokens the template takes is the tokenizer's affair; the pipeline has the numbers of one of them."""
        check_dynamic(pipeline.scheduler.config)
        prefix, suffix = pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
        pipeline.prompt_template_encode_num_suffix_tokens = len(pipeline.tokenizer(suffix).input_ids)

    def sigmas(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> torch.Tensor:
        if bundle.pipeline.config.is_distilled and sampling.shift is None:
            return exponential_shift(uniform_sigmas(sampling.steps), _DISTILLED_MU)
        return super().sigmas(bundle, sampling)

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        """tokens: `(N, L, layers, D)`; the mask is False between a prompt and the end of its template."""
        tokens, mask = bundle.pipeline.encode_prompt(
            prompts.required_texts, device=bundle.device, max_sequence_length=self.max_sequence_length
        )
        return Embedding(tokens=tokens, mask=mask)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        grid = (latents.shape[2] // 2, latents.shape[3] // 2)
        velocity = bundle.transformer(
            hidden_states=pack(latents),
            encoder_hidden_states=embedding.tokens,
            timestep=step.time,
            position_ids=bundle.pipeline.prepare_position_ids(embedding.tokens.shape[1], *grid, latents.device),
            encoder_attention_mask=embedding.mask,
            return_dict=False,
        )[0]
        return unpack(velocity, *grid)
