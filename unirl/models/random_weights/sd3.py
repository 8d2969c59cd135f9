"""Stable Diffusion 3 in the shape of 3.5-medium: dual attention, query and key norms, two CLIP encoders and T5."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import autoencoder, clip_config, clip_tokenizer, redraw, t5_encoder, t5_tokenizer

_SIDE = 32  # pixels of the default sample


def write(
    folder: Path, *, with_t5: bool = True, layers: int = 2, width: int = 32, head_dim: int = 8, seed: int = 0
) -> Path:
    """Write the pipeline to `folder` and return it. layers, width (a multiple of head_dim): of the transformer."""
    parts: dict[str, Any] = {
        "transformer": _transformer(layers, width, head_dim),
        "vae": autoencoder(),
        "text_encoder": transformers.CLIPTextModelWithProjection(clip_config(width=8)),
        "text_encoder_2": transformers.CLIPTextModelWithProjection(clip_config(width=16)),
        "text_encoder_3": t5_encoder() if with_t5 else None,
    }
    redraw(parts.values(), seed)
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts["tokenizer"] = parts["tokenizer_2"] = clip_tokenizer()
    parts["tokenizer_3"] = t5_tokenizer() if with_t5 else None
    diffusers.StableDiffusion3Pipeline(**parts).save_pretrained(folder)
    return folder


def _transformer(layers: int, width: int, head_dim: int) -> diffusers.SD3Transformer2DModel:
    return diffusers.SD3Transformer2DModel(
        sample_size=_SIDE // 2,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=head_dim,
        num_attention_heads=width // head_dim,
        joint_attention_dim=32,
        caption_projection_dim=width,
        pooled_projection_dim=8 + 16,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


CHECKPOINTS = {
    "sd3": RandomCheckpoint("StableDiffusion3Pipeline", write),
    "sd3_without_t5": RandomCheckpoint("StableDiffusion3Pipeline", partial(write, with_t5=False)),
}
