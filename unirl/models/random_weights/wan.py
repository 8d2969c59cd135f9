"""Wan 2.1 and 2.2. The scheduler is theirs, UniPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import redraw, t5_tokenizer

CHANNELS = 4  # of a latent; four more hold the mask where a picture enters beside it


def write_text_to_video(folder: Path) -> Path:
    """As Wan 2.1."""
    return _write(diffusers.WanPipeline, folder, transformer=transformer(), vae=autoencoder())


def write_experts(folder: Path) -> Path:
    """As Wan 2.2 A14B."""
    experts = {"transformer": transformer(), "transformer_2": transformer()}
    return _write(diffusers.WanPipeline, folder, boundary_ratio=0.875, vae=autoencoder(), **experts)


def write_experts_image_to_video(folder: Path) -> Path:
    """As Wan 2.2 A14B, image-to-video: no CLIP."""
    channels = 2 * CHANNELS + 4
    experts = {"transformer": transformer(channels), "transformer_2": transformer(channels)}
    return _write(diffusers.WanImageToVideoPipeline, folder, boundary_ratio=0.9, vae=autoencoder(), **experts)


def write_token_times(folder: Path) -> Path:
    """As Wan 2.2 TI2V-5B."""
    return _write(
        diffusers.WanPipeline, folder, expand_timesteps=True, transformer=transformer(), vae=patched_autoencoder()
    )


def write_image_to_video(folder: Path) -> Path:
    """As Wan 2.1 image-to-video."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    parts = {
        "transformer": transformer(2 * CHANNELS + 4, image_dim=16, added_kv_proj_dim=24),
        "image_encoder": transformers.CLIPVisionModel(vision),
        "image_processor": transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    }
    return _write(diffusers.WanImageToVideoPipeline, folder, vae=autoencoder(), **parts)


def _write(pipeline: Any, folder: Path, **parts: Any) -> Path:
    parts = {"transformer_2": None, "text_encoder": text_encoder(), **parts}
    redraw(parts[name] for name in ("transformer", "transformer_2", "text_encoder", "vae"))
    if "image_encoder" in parts:
        redraw([parts["image_encoder"]])
    parts["scheduler"] = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    pipeline(tokenizer=t5_tokenizer(), **parts).save_pretrained(folder)
    return folder


def transformer(channels: int = CHANNELS, **settings: Any) -> diffusers.WanTransformer3DModel:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=CHANNELS,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **settings,
    )


def autoencoder(**settings: Any) -> diffusers.AutoencoderKLWan:
    """8 pixels and 4 frames of a latent, with a mean and deviation for each channel."""
    defaults: dict[str, Any] = {
        "base_dim": 3,
        "z_dim": CHANNELS,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1 * channel for channel in range(CHANNELS)],
        "latents_std": [1 + 0.1 * channel for channel in range(CHANNELS)],
    }
    return diffusers.AutoencoderKLWan(**{**defaults, **settings})


def patched_autoencoder() -> diffusers.AutoencoderKLWan:
    """16 pixels of a latent: the autoencoder of Wan 2.2 on patches of two pixels."""
    return autoencoder(
        decoder_base_dim=3,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )


def text_encoder() -> transformers.UMT5EncoderModel:
    config = transformers.UMT5Config(
        vocab_size=258, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=1
    )
    return transformers.UMT5EncoderModel(config)


CHECKPOINTS = {
    "wan21": RandomCheckpoint("WanPipeline", write_text_to_video),
    "wan21_i2v": RandomCheckpoint("WanImageToVideoPipeline", write_image_to_video),
    "wan22_a14b": RandomCheckpoint("WanPipeline", write_experts),
    "wan22_a14b_i2v": RandomCheckpoint("WanImageToVideoPipeline", write_experts_image_to_video),
    "wan22_ti2v": RandomCheckpoint("WanPipeline", write_token_times),
}
