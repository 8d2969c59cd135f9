"""LTX-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import gemma_tokenizer, redraw


def write(folder: Path) -> Path:
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    parts: dict[str, Any] = {
        "transformer": _transformer(),
        "vae": _video_autoencoder(),
        "audio_vae": _audio_autoencoder(),
        "text_encoder": transformers.Gemma3ForConditionalGeneration(_gemma3()),
        "connectors": _connectors(),
        "vocoder": LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
    }
    redraw(parts.values())
    draws = torch.Generator().manual_seed(1)
    for name in ("vae", "audio_vae"):
        for buffer, start in (("latents_mean", 0.0), ("latents_std", 1.0)):
            values = parts[name].get_buffer(buffer)
            values.copy_(start + 0.3 * torch.rand(values.shape, generator=draws))
    # The published line starts at 1024 tokens, far beyond a tiny video.
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=16,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    parts["tokenizer"] = gemma_tokenizer(padding_side="left")
    diffusers.LTX2Pipeline(**parts).save_pretrained(folder)
    return folder


def _transformer() -> diffusers.LTX2VideoTransformer3DModel:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
    )


def _video_autoencoder() -> diffusers.AutoencoderKLLTX2Video:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=8,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def _audio_autoencoder() -> diffusers.AutoencoderKLLTX2Audio:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        mel_bins=8,
    )


def _connectors() -> torch.nn.Module:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    settings: dict[str, Any] = {}
    for stream in ("video", "audio"):
        settings |= {
            f"{stream}_connector_num_attention_heads": 4,
            f"{stream}_connector_attention_head_dim": 8,
            f"{stream}_connector_num_layers": 1,
            f"{stream}_connector_num_learnable_registers": 8,
        }
    return LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=3, rope_double_precision=False, rope_type="split", **settings
    )


def _gemma3() -> transformers.Gemma3Config:
    text = {
        "vocab_size": len(gemma_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=5,
        mm_tokens_per_image=4,
    )


CHECKPOINTS = {
    "ltx2": RandomCheckpoint("LTX2Pipeline", write),
}
