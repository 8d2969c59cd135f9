"""Tiny random Hunyuan pipelines. Their prompt templates have as many tokens as with the real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import normalizers
from transformers import CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from tests.families.tiny import byte_tokenizer, clip_config, clip_tokenizer, redraw

_WIDTH = 16  # of the text encoders


def write_hunyuan_video(folder: Path) -> Path:
    tokenizer = templated(
        byte_tokenizer(eos="<|end|>", pad="<|pad|>", length=2048),
        head=DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0],
        tokens=DEFAULT_PROMPT_TEMPLATE["crop_start"],
    )
    parts: dict[str, Any] = {
        "transformer": HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=2,
            text_embed_dim=_WIDTH,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        "text_encoder": LlamaModel(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=_WIDTH,
                intermediate_size=2 * _WIDTH,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                pad_token_id=0,
            )
        ),
        "text_encoder_2": CLIPTextModel(clip_config()),
    }
    redraw(parts.values())
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    HunyuanVideoPipeline(
        **parts, tokenizer=tokenizer, tokenizer_2=clip_tokenizer(), scheduler=scheduler
    ).save_pretrained(folder)
    return folder


def templated(tokenizer: PreTrainedTokenizerFast, *, head: str, tokens: int) -> PreTrainedTokenizerFast:
    """`head`, the part of a template that pipelines cut off again by its length, becomes that many tokens."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(head, "~" * tokens)
    return tokenizer
