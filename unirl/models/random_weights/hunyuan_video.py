"""HunyuanVideo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.hunyuan import WIDTH, templated
from unirl.models.random_weights.parts import byte_tokenizer, clip_config, clip_tokenizer, redraw


def write(folder: Path) -> Path:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    tokenizer = byte_tokenizer(eos="<|end|>", pad="<|pad|>", length=2048)
    head, tokens = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0], DEFAULT_PROMPT_TEMPLATE["crop_start"]
    video: dict[str, Any] = {
        "latent_channels": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        "block_out_channels": (8,) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    llama = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    parts: dict[str, Any] = {
        "transformer": diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo(**video),
        "text_encoder": transformers.LlamaModel(llama),
        "text_encoder_2": transformers.CLIPTextModel(clip_config()),
    }
    redraw(parts.values())
    parts["tokenizer"], parts["tokenizer_2"] = templated(tokenizer, head, tokens), clip_tokenizer()
    diffusers.HunyuanVideoPipeline(
        **parts, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    ).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "hunyuan_video": RandomCheckpoint("HunyuanVideoPipeline", write),
}
