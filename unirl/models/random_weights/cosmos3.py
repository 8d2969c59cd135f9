"""Cosmos 3, with UniPC, as published."""

from __future__ import annotations

from pathlib import Path

import diffusers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer, redraw

SHIFT = 3.0


def write(folder: Path) -> Path:
    tokenizer = qwen_tokenizer()
    transformer = diffusers.Cosmos3OmniTransformer(
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
    vae = diffusers.AutoencoderKLWan(
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
    diffusers.Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=tokenizer,  # type: ignore[arg-type]
        vae=vae,
        scheduler=diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=SHIFT, use_karras_sigmas=False
        ),
        enable_safety_checker=False,
    ).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "cosmos3": RandomCheckpoint("Cosmos3OmniPipeline", write),
}
