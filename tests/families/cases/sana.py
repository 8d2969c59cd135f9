"""Sana against SanaPipeline with its scheduler swapped for Euler's at the same shift."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2Model

from tests.families.case import Case, run_pipeline
from tests.families.tiny import gemma2_config, gemma_tokenizer, redraw
from unirl.models.base import Bundle
from unirl.models.diffusion.sana import Sana
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    """The published scheduler, a text encoder as deep as it is needed, an autoencoder that halves a side."""
    tokenizer = gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=WIDTH,
        sample_size=16,
    )
    text_encoder = Gemma2Model(gemma2_config(len(tokenizer), layers=1, width=WIDTH))
    blocks = ("ResBlock", "EfficientViTBlock")
    settings: dict[str, Any] = {
        "latent_channels": 4,
        "attention_head_dim": 2,
        "encoder_block_types": blocks,
        "decoder_block_types": blocks,
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
        "scaling_factor": 0.41407,
    }
    vae = AutoencoderDC(**settings)
    redraw([transformer, text_encoder, vae])
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    SanaPipeline(tokenizer, text_encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class InstructedNegative(Sana):
    """The instruction stands before the negative prompt as well."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


@dataclasses.dataclass(frozen=True)
class OneShift(Sana):
    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(shift_sigmas(uniform_sigmas(sampling.steps), 3.0))
        return Schedule(sigmas=sigmas, times=self.time(bundle, sigmas[:-1], self.latent_shape(bundle, sampling)))


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    parts = {**bundle.processors["pipeline"].components, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
    steps, output = run_pipeline(
        SanaPipeline(**parts),
        case.prompts.required_texts,
        latents,
        case,
        max_sequence_length=48,
        use_resolution_binning=False,
    )
    return [*steps], Media(images=output.images)


def family(folder: Path) -> Sana:
    return Sana(str(folder), max_sequence_length=48)


CASES = [
    Case(
        name="sana",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5),
        reference=reference,
        wrong={
            "no instruction": lambda folder: dataclasses.replace(family(folder), instruction=()),
            "an instruction before the negative prompt": lambda folder: InstructedNegative(
                str(folder), max_sequence_length=48
            ),
            "one shift": lambda folder: OneShift(str(folder), max_sequence_length=48),
        },
    )
]
