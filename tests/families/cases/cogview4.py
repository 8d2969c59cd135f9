"""CogView4, one prompt at a time: in a batch, its pipeline lets the padding of other prompts into a prompt's text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor
from transformers import GlmConfig, GlmModel

from tests.families.case import Case, run_pipeline
from tests.families.tiny import autoencoder, gemma_tokenizer, redraw
from unirl.models.base import Bundle
from unirl.models.diffusion.cogview4 import CogView4
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    tokenizer: Any = gemma_tokenizer(padding_side="left")
    transformer = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=WIDTH,
        time_embed_dim=16,
        condition_dim=4,
        sample_size=16,
        pos_embed_max_size=16,
        rope_axes_dim=(16, 16),
    )
    text_encoder = GlmModel(
        GlmConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=0,
        )
    )
    vae = autoencoder(scaling_factor=0.7, shift_factor=None)
    redraw([transformer, text_encoder, vae])
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    CogView4Pipeline(tokenizer, text_encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class ShiftedTime(CogView4):
    """The model's time is the noise level, as in most families."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = super().schedule(bundle, sampling).sigmas
        return Schedule(sigmas=sigmas, times=1000 * sigmas[:-1])


@dataclasses.dataclass(frozen=True)
class PaddingIsContent(CogView4):
    """What joins rows of different length is not masked."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None
        whole = dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))
        return super().predict(bundle, latents, step, whole, guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """With the attention of inference, which the pipeline is loaded with."""
    pipeline = bundle.processors["pipeline"]
    ours = [block.attn1.processor for block in pipeline.transformer.transformer_blocks]
    for block in pipeline.transformer.transformer_blocks:
        block.attn1.set_processor(CogView4AttnProcessor())
    walks = [
        run_pipeline(pipeline, [text], latents[[row]], case) for row, text in enumerate(case.prompts.required_texts)
    ]
    for block, processor in zip(pipeline.transformer.transformer_blocks, ours, strict=True):
        block.attn1.set_processor(processor)
    steps = [torch.cat(rows) for rows in zip(*(latents for latents, _ in walks), strict=True)]
    return [*steps], Media(images=torch.cat([output.images for _, output in walks]))


def family(folder: Path) -> CogView4:
    return CogView4(str(folder))


CASES = [
    Case(
        name="cogview4",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=48, guidance=5.0),
        reference=reference,
        wrong={
            "time is the shifted level": lambda folder: ShiftedTime(str(folder)),
            "padding is content": lambda folder: PaddingIsContent(str(folder)),
        },
    )
]
