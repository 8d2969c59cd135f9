"""CogView4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import autoencoder, gemma_tokenizer, redraw

_WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    tokenizer: Any = gemma_tokenizer(padding_side="left")
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=_WIDTH,
        time_embed_dim=16,
        condition_dim=4,
        sample_size=16,
        pos_embed_max_size=16,
        rope_axes_dim=(16, 16),
    )
    text_encoder = transformers.GlmModel(
        transformers.GlmConfig(
            vocab_size=len(tokenizer),
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=0,
        )
    )
    vae = autoencoder(scaling_factor=0.7, shift_factor=None)
    redraw([transformer, text_encoder, vae])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    diffusers.CogView4Pipeline(tokenizer, text_encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "cogview4": RandomCheckpoint("CogView4Pipeline", write),
}
