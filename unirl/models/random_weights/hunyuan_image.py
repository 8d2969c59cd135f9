"""HunyuanImage 2.1."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.hunyuan import WIDTH, glyph_parts, templated
from unirl.models.random_weights.parts import redraw


def write(folder: Path, *, distilled: bool = False) -> Path:
    """distilled: guidance as an input, mean flow, no guider."""
    parts = glyph_parts()
    parts["transformer"] = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(8, 8),
        guidance_embeds=distilled,
        use_meanflow=distilled,
    )
    image: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 32)}
    parts["vae"] = diffusers.AutoencoderKLHunyuanImage(
        **image, layers_per_block=1, spatial_compression_ratio=2, sample_size=16, scaling_factor=0.75289
    )
    redraw(part for part in parts.values() if isinstance(part, torch.nn.Module))
    if not distilled:
        parts["guider"] = diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_momentum=-0.5)
    pipeline = diffusers.HunyuanImagePipeline(**parts)
    head = pipeline.prompt_template_encode.split("system\n")[1].split("<|im_end|>")[0]
    # The rest of the 34 is ChatML around it.
    templated(pipeline.tokenizer, head, pipeline.prompt_template_encode_start_idx - 16)
    pipeline.save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "hunyuan_image": RandomCheckpoint("HunyuanImagePipeline", write),
    "hunyuan_image_distilled": RandomCheckpoint("HunyuanImagePipeline", partial(write, distilled=True)),
}
