"""Tiny random Hunyuan pipelines. Their prompt templates have as many tokens as with the real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import normalizers
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from tests.families.tiny import byte_tokenizer, clip_config, clip_tokenizer, qwen_tokenizer, redraw

_WIDTH = 32  # of the text encoders


def write_hunyuan_video(folder: Path) -> Path:
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
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
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
            text_embed_dim=_WIDTH,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        "vae": AutoencoderKLHunyuanVideo(**video),
        "text_encoder": LlamaModel(llama),
        "text_encoder_2": CLIPTextModel(clip_config()),
    }
    redraw(parts.values())
    parts["tokenizer"], parts["tokenizer_2"] = templated(tokenizer, head, tokens), clip_tokenizer()
    HunyuanVideoPipeline(**parts, scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0)).save_pretrained(folder)
    return folder


def write_hunyuan_video_15(folder: Path, *, task: Literal["t2v", "i2v"] = "t2v", mean_flow: bool = False) -> Path:
    parts = _glyph_parts()
    parts["transformer"] = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=_WIDTH,
        text_embed_2_dim=_WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type=task,
        use_meanflow=mean_flow,
    )
    video: dict[str, Any] = {"block_out_channels": (16,) * 3, "layers_per_block": 1, "spatial_compression_ratio": 4}
    parts["vae"] = AutoencoderKLHunyuanVideo15(latent_channels=4, **video)
    if task == "i2v":
        vision: dict[str, Any] = {
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        parts["image_encoder"] = SiglipVisionModel(SiglipVisionConfig(**vision, image_size=8, patch_size=4))
    redraw(part for part in parts.values() if isinstance(part, torch.nn.Module))
    parts["guider"] = ClassifierFreeGuidance(guidance_scale=6.0)
    if task == "i2v":
        parts["feature_extractor"] = SiglipImageProcessor(size={"height": 8, "width": 8})
        pipeline = HunyuanVideo15ImageToVideoPipeline(**parts)
    else:
        pipeline = HunyuanVideo15Pipeline(**parts)
    # The rest of the 108 is ChatML around it.
    templated(pipeline.tokenizer, pipeline.system_message, pipeline.prompt_template_encode_start_idx - 16)
    pipeline.save_pretrained(folder)
    return folder


def write_hunyuan_image(folder: Path, *, distilled: bool = False) -> Path:
    """distilled: guidance as an input, mean flow, no guider."""
    parts = _glyph_parts()
    parts["transformer"] = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=_WIDTH,
        text_embed_2_dim=_WIDTH,
        rope_axes_dim=(8, 8),
        guidance_embeds=distilled,
        use_meanflow=distilled,
    )
    image: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 32)}
    parts["vae"] = AutoencoderKLHunyuanImage(
        **image, layers_per_block=1, spatial_compression_ratio=2, sample_size=16, scaling_factor=0.75289
    )
    redraw(part for part in parts.values() if isinstance(part, torch.nn.Module))
    if not distilled:
        parts["guider"] = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_momentum=-0.5)
    pipeline = HunyuanImagePipeline(**parts)
    head = pipeline.prompt_template_encode.split("system\n")[1].split("<|im_end|>")[0]
    # The rest of the 34 is ChatML around it.
    templated(pipeline.tokenizer, head, pipeline.prompt_template_encode_start_idx - 16)
    pipeline.save_pretrained(folder)
    return folder


def templated(tokenizer: PreTrainedTokenizerFast, head: str, tokens: int) -> PreTrainedTokenizerFast:
    """`head`, the part of a template that pipelines cut off again by its length, becomes that many tokens."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(head, "~" * tokens)
    return tokenizer


def _glyph_parts() -> dict[str, Any]:
    """A language model for the text, a letter model for what the text quotes."""
    tokenizer = qwen_tokenizer()
    qwen = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    )
    letters = T5Config(
        vocab_size=384,
        d_model=_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return {
        "text_encoder": Qwen2_5_VLTextModel(qwen),
        "tokenizer": tokenizer,
        "text_encoder_2": T5EncoderModel(letters),
        "tokenizer_2": ByT5Tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
