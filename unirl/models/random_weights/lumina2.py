"""Lumina2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import autoencoder, gemma2_config, gemma_tokenizer, redraw

_WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    tokenizer: Any = gemma_tokenizer()
    transformer = diffusers.Lumina2Transformer2DModel(
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
        cap_feat_dim=_WIDTH,
    )
    text_encoder = transformers.Gemma2Model(gemma2_config(len(tokenizer), layers=2, width=_WIDTH))
    vae = autoencoder(factor=8, scaling_factor=0.3611, shift_factor=0.1159)  # the pipeline knows no other factor
    redraw([transformer, text_encoder, vae])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0)
    diffusers.Lumina2Pipeline(transformer, scheduler, vae, text_encoder, tokenizer).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "lumina2": RandomCheckpoint("Lumina2Pipeline", write),
}
