"""Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer, redraw


def write(folder: Path) -> Path:
    diffusers.QwenImagePipeline(**parts()).save_pretrained(folder)
    return folder


def parts(**transformer: Any) -> dict[str, Any]:
    """What the text-to-image and the editing pipelines share. transformer: settings of its own."""
    modules: dict[str, Any] = {
        "transformer": diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
            **transformer,
        ),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, 0.2, -0.3, 0.4],
            latents_std=[1.0, 2.0, 1.5, 0.5],
        ),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(qwen2_5_vl_config()),
    }
    redraw(modules.values())
    return {**modules, "scheduler": scheduler(shift_terminal=0.02), "tokenizer": qwen_tokenizer()}


def scheduler(**settings: Any) -> diffusers.FlowMatchEulerDiscreteScheduler:
    """The published one, but for a steeper line: at the few tokens of a tiny picture the shift is plain to see."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=4,
        max_image_seq_len=16,
        **settings,
    )


def qwen2_5_vl_config() -> transformers.Qwen2_5_VLConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 263,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 28,
            "patch_size": 14,
        },
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
    )


CHECKPOINTS = {
    "qwen_image": RandomCheckpoint("QwenImagePipeline", write),
}
