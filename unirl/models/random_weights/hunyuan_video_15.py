"""HunyuanVideo 1.5, from text and from a picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.hunyuan import WIDTH, glyph_parts, templated
from unirl.models.random_weights.parts import redraw


def write(folder: Path, *, task: Literal["t2v", "i2v"] = "t2v", mean_flow: bool = False) -> Path:
    parts = glyph_parts()
    parts["transformer"] = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type=task,
        use_meanflow=mean_flow,
    )
    video: dict[str, Any] = {"block_out_channels": (16,) * 3, "layers_per_block": 1, "spatial_compression_ratio": 4}
    parts["vae"] = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, **video)
    if task == "i2v":
        vision: dict[str, Any] = {
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        parts["image_encoder"] = transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(**vision, image_size=8, patch_size=4)
        )
    redraw(part for part in parts.values() if isinstance(part, torch.nn.Module))
    parts["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=6.0)
    if task == "i2v":
        parts["feature_extractor"] = transformers.SiglipImageProcessor(size={"height": 8, "width": 8})
        pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline(**parts)
    else:
        pipeline = diffusers.HunyuanVideo15Pipeline(**parts)
    # The rest of the 108 is ChatML around it.
    templated(pipeline.tokenizer, pipeline.system_message, pipeline.prompt_template_encode_start_idx - 16)
    pipeline.save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "hunyuan_video_15": RandomCheckpoint("HunyuanVideo15Pipeline", write),
    "hunyuan_video_15_i2v": RandomCheckpoint("HunyuanVideo15ImageToVideoPipeline", partial(write, task="i2v")),
}
