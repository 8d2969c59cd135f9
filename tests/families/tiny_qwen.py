"""Tiny random pipelines of the Qwen-Image families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.tiny import qwen_tokenizer, redraw
from unirl.models.pictures import picture_processor


def write_qwen_image(folder: Path) -> Path:
    QwenImagePipeline(**_parts()).save_pretrained(folder)
    return folder


def write_qwen_image_edit(folder: Path, *, zero_cond_t: bool) -> Path:
    """zero_cond_t: as 2511 has it"""
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    processor = picture_processor(Qwen2VLProcessor, pictures, qwen_tokenizer())
    QwenImageEditPlusPipeline(**_parts(zero_cond_t=zero_cond_t), processor=processor).save_pretrained(folder)
    return folder


def write_qwen_image_2_1(folder: Path) -> Path:
    modules: dict[str, Any] = {
        "transformer": QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=32,
            mlp_ratio=2,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, 0.2, -0.3, 0.4],
            latents_std=[1.0, 2.0, 1.5, 0.5],
        ),
        "text_encoder": Qwen3VLForConditionalGeneration(_text_encoder_2_1()),
    }
    redraw(modules.values())
    pictures = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128})
    processor = picture_processor(Qwen3VLProcessor, pictures, qwen_tokenizer(padding_side="left"))
    QwenImage21Pipeline(**modules, scheduler=scheduler(), processor=processor).save_pretrained(folder)
    return folder


def _parts(**transformer: Any) -> dict[str, Any]:
    """What the text-to-image and the editing pipelines share. transformer: settings of its own."""
    modules: dict[str, Any] = {
        "transformer": QwenImageTransformer2DModel(
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
        "vae": AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, 0.2, -0.3, 0.4],
            latents_std=[1.0, 2.0, 1.5, 0.5],
        ),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(_text_encoder()),
    }
    redraw(modules.values())
    return {**modules, "scheduler": scheduler(shift_terminal=0.02), "tokenizer": qwen_tokenizer()}


def scheduler(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    """The published one, but for a steeper line: at the few tokens of a tiny picture the shift is plain to see."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=4,
        max_image_seq_len=16,
        **settings,
    )


def _text_encoder() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
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


def _text_encoder_2_1() -> Qwen3VLConfig:
    return Qwen3VLConfig(
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
