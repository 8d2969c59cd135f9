"""Krea 2, undistilled and distilled."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer, redraw


def write(folder: Path, *, distilled: bool = False) -> Path:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.2, -0.3, 0.4],
        latents_std=[1.0, 2.0, 1.5, 0.5],
    )
    tokenizer = qwen_tokenizer()
    text_encoder = transformers.Qwen3VLModel(_qwen3_vl(len(tokenizer)))
    redraw((transformer, vae, text_encoder))
    pipeline = diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        transformer=transformer,
        text_encoder_select_layers=(1, 2, 3),
        is_distilled=distilled,
    )
    pipeline.save_pretrained(folder)
    return folder


def _qwen3_vl(vocabulary: int) -> transformers.Qwen3VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
    }
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision)


CHECKPOINTS = {
    "krea2": RandomCheckpoint("Krea2Pipeline", write),
    "krea2_distilled": RandomCheckpoint("Krea2Pipeline", partial(write, distilled=True)),
}
