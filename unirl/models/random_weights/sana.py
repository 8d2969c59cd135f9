"""Sana."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import gemma2_config, gemma_tokenizer, redraw

_WIDTH = 16  # of the text encoder


def write(folder: Path) -> Path:
    """The published scheduler, a text encoder as deep as it is needed, an autoencoder that halves a side."""
    tokenizer = gemma_tokenizer()
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_WIDTH,
        sample_size=16,
    )
    text_encoder = transformers.Gemma2Model(gemma2_config(len(tokenizer), layers=1, width=_WIDTH))
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
    vae = diffusers.AutoencoderDC(**settings)
    redraw([transformer, text_encoder, vae])
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    diffusers.SanaPipeline(tokenizer, text_encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "sana": RandomCheckpoint("SanaPipeline", write),
}
