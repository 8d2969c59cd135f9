"""Lumina2, with and without the renormalisation of guided velocities."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from transformers import Gemma2Model

from tests.families.case import Case, Reference, run_pipeline
from tests.families.tiny import autoencoder, gemma2_config, gemma_tokenizer, redraw
from unirl.models.base import Bundle
from unirl.models.diffusion.lumina2 import Lumina2
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

WIDTH = 16  # of the text encoder
LENGTH = 256  # tokens of a prompt: one a byte, 162 of the system prompt


def write(folder: Path) -> Path:
    tokenizer: Any = gemma_tokenizer()
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 32, 32),
        cap_feat_dim=WIDTH,
    )
    text_encoder = Gemma2Model(gemma2_config(len(tokenizer), layers=2, width=WIDTH))
    vae = autoencoder(factor=8, scaling_factor=0.3611, shift_factor=0.1159)  # the pipeline knows no other factor
    redraw([transformer, text_encoder, vae])
    scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0)
    Lumina2Pipeline(transformer, scheduler, vae, text_encoder, tokenizer).save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class InstructedNegative(Lumina2):
    """The system prompt stands before the negative prompt as well."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(Lumina2):
    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


def family(folder: Path) -> Lumina2:
    return Lumina2(str(folder))


def plain(folder: Path) -> Lumina2:
    return Lumina2(str(folder), renormalise=False)


def reference(*, renormalise: bool) -> Reference:
    def run(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
        steps, output = run_pipeline(
            bundle.processors["pipeline"],
            case.prompts.required_texts,
            latents,
            case,
            cfg_normalization=renormalise,
            max_sequence_length=LENGTH,
        )
        return [*steps], Media(images=output.images)

    return run


SAMPLING = DiffusionSamplingParams(steps=4, height=48, width=64, guidance=4.0)
CASES = [
    Case(
        "lumina2",
        write,
        family,
        SAMPLING,
        reference(renormalise=True),
        wrong={
            "guidance without renormalisation": plain,
            "a system prompt before the negative prompt": lambda folder: InstructedNegative(str(folder)),
            "time is sigma": lambda folder: TimeIsSigma(str(folder)),
        },
    ),
    Case(
        "lumina2 plain",
        write,
        plain,
        SAMPLING,
        reference(renormalise=False),
        wrong={"guidance with renormalisation": family},
    ),
]
