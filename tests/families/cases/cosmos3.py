"""Cosmos 3 text-to-image."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from tests.families.case import Case, run_pipeline
from tests.families.tiny import qwen_tokenizer, redraw
from unirl.models.base import Bundle
from unirl.models.diffusion.cosmos3 import Cosmos3
from unirl.sde.steps import Schedule
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

SHIFT = 3.0


def write(folder: Path) -> Path:
    """With UniPC, as published."""
    tokenizer = qwen_tokenizer()
    transformer = Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=48,
        latent_channel=4,
        latent_patch_size=2,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        rope_scaling={"mrope_section": [4, 2, 2]},
        rope_axes_dim=(4, 2, 2),
        rope_theta=1e6,
        vocab_size=len(tokenizer),
        enable_fps_modulation=True,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.2, -0.3, 0.4],
        latents_std=[1.0, 2.0, 1.5, 0.5],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    redraw((transformer, vae))
    Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=tokenizer,  # type: ignore[arg-type]
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=SHIFT, use_karras_sigmas=False
        ),
        enable_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """One sample a call, on Euler's scheduler: UniPC walks another way."""
    pipeline = bundle.processors["pipeline"]
    published = pipeline.scheduler
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    walks, pictures = [], []
    for text, x in zip(case.prompts.required_texts, latents[:, None, :, None], strict=True):
        steps, output = run_pipeline(
            pipeline, [text], x, case, num_frames=1, negative_prompt=case.sampling.negative_prompt
        )
        walks.append([step[:, :, 0] for step in steps])
        pictures.append(output.video)
    pipeline.scheduler = published
    together: list[torch.Tensor | None] = [torch.cat(rows) for rows in zip(*walks, strict=True)]
    return together, Media(images=torch.cat(pictures))


@dataclasses.dataclass(frozen=True)
class NoShift(Cosmos3):
    """The schedule is not shifted."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        return super().schedule(bundle, dataclasses.replace(sampling, shift=1.0))


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(Cosmos3):
    """The model time is not scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


@dataclasses.dataclass(frozen=True)
class SizeNotNegated(Cosmos3):
    """The unconditional branch is encoded as a prompt is."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


CASES = [
    Case(
        name="cosmos3",
        write=write,
        family=lambda folder: Cosmos3(str(folder)),
        # An odd number of latent columns: the last patch is half padding.
        sampling=DiffusionSamplingParams(steps=4, height=64, width=48, guidance=6.0, negative_prompt="a blurred one"),
        reference=reference,
        wrong={
            "no shift": lambda folder: NoShift(str(folder)),
            "time is sigma": lambda folder: TimeIsSigma(str(folder)),
            "size not negated": lambda folder: SizeNotNegated(str(folder)),
        },
    )
]
