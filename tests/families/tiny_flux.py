"""Folders that diffusers loads as FLUX pipelines: every part real, tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tests.families.tiny import autoencoder, clip_config, clip_tokenizer, redraw, t5_encoder, t5_tokenizer


def write_flux1(folder: Path, *, pipeline: type = FluxPipeline, guidance: bool = True) -> Path:
    """guidance: dev, which takes guidance as an input and shifts by the size of the picture; else schnell."""
    parts: dict[str, Any] = {
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": CLIPTextModel(clip_config(width=16)),
        "text_encoder_2": t5_encoder(),
    }
    redraw(parts.values())
    parts["scheduler"] = (
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        if guidance
        else FlowMatchEulerDiscreteScheduler(shift=1.0)
    )
    parts["tokenizer"], parts["tokenizer_2"] = clip_tokenizer(), t5_tokenizer()
    pipeline(**parts).save_pretrained(folder)
    return folder
