"""Qwen-Image-2.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.pictures import picture_processor
from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer, redraw
from unirl.models.random_weights.qwen_image import scheduler


def write(folder: Path) -> Path:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    modules: dict[str, Any] = {
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=32,
            mlp_ratio=2,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, 0.2, -0.3, 0.4],
            latents_std=[1.0, 2.0, 1.5, 0.5],
        ),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(qwen3_vl_config()),
    }
    redraw(modules.values())
    pictures = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128})
    processor = picture_processor(transformers.Qwen3VLProcessor, pictures, qwen_tokenizer(padding_side="left"))
    diffusers.QwenImage21Pipeline(**modules, scheduler=scheduler(), processor=processor).save_pretrained(folder)
    return folder


def qwen3_vl_config() -> transformers.Qwen3VLConfig:
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 263,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=5,
        video_token_id=6,
    )


CHECKPOINTS = {
    "qwen_image_2_1": RandomCheckpoint("QwenImage21Pipeline", write),
}
