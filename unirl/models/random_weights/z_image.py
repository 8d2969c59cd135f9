"""Z-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import autoencoder, qwen3_config, qwen_tokenizer, redraw

_WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    tokenizer: Any = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    text_encoder = transformers.Qwen3Model(qwen3_config(len(tokenizer), layers=2, width=_WIDTH))
    vae = autoencoder(scaling_factor=0.3611, shift_factor=0.1159)
    redraw([transformer, text_encoder, vae])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    diffusers.ZImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "z_image": RandomCheckpoint("ZImagePipeline", write),
}
