"""FLUX.1: dev, schnell, Kontext."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import (
    autoencoder,
    clip_config,
    clip_tokenizer,
    redraw,
    t5_encoder,
    t5_tokenizer,
)


def write(folder: Path, *, guidance: bool = True, edits: bool = False) -> Path:
    """guidance: dev (Kontext, where it edits), which takes it as an input and shifts by size; else schnell."""
    parts: dict[str, Any] = {
        "transformer": diffusers.FluxTransformer2DModel(
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
        "text_encoder": transformers.CLIPTextModel(clip_config(width=16)),
        "text_encoder_2": t5_encoder(),
    }
    redraw(parts.values())
    parts["scheduler"] = (
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        if guidance
        else diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    )
    parts["tokenizer"], parts["tokenizer_2"] = clip_tokenizer(), t5_tokenizer()
    pipeline = diffusers.FluxKontextPipeline if edits else diffusers.FluxPipeline
    pipeline(**parts).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "flux1_dev": RandomCheckpoint("FluxPipeline", write),
    "flux1_schnell": RandomCheckpoint("FluxPipeline", partial(write, guidance=False)),
    "flux1_kontext": RandomCheckpoint("FluxKontextPipeline", partial(write, edits=True)),
}
