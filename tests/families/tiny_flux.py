"""Folders that diffusers loads as FLUX pipelines: every part real, tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Flux3AutoBlocks,
    Flux3DistilledAutoBlocks,
    Flux3Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    CLIPTextModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.families.tiny import (
    autoencoder,
    byte_tokenizer,
    clip_config,
    clip_tokenizer,
    qwen3_config,
    qwen_tokenizer,
    redraw,
    t5_encoder,
    t5_tokenizer,
)

TEXT_LAYERS = (1, 2, 3)


def write_flux1(folder: Path, *, pipeline: type = FluxPipeline, guidance: bool = True) -> Path:
    """guidance: dev, which takes guidance as an input and shifts by the size of the picture; else schnell."""
    parts: dict[str, Any] = {
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        "text_encoder": CLIPTextModel(clip_config(width=16)),
        "text_encoder_2": t5_encoder(),
    }
    redraw(parts.values())
    parts["scheduler"] = (
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        if guidance
        else FlowMatchEulerDiscreteScheduler(shift=1.0)
    )
    parts["tokenizer"], parts["tokenizer_2"] = clip_tokenizer(), t5_tokenizer()
    pipeline(**parts).save_pretrained(folder)
    return folder


def flux2_autoencoder() -> AutoencoderKLFlux2:
    """4 pixels a latent, 8 a token; the statistics of the latents are drawn as well."""
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 3,  # type: ignore[arg-type]
        block_out_channels=(8, 8, 8),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    draws = torch.Generator().manual_seed(5)
    vae.bn.running_mean.normal_(generator=draws)  # type: ignore[union-attr]
    vae.bn.running_var.uniform_(0.5, 2, generator=draws)  # type: ignore[union-attr]
    return vae


def write_klein(folder: Path, *, distilled: bool = False) -> Path:
    tokenizer = qwen_tokenizer()
    parts: dict[str, Any] = {
        "transformer": _flux2_transformer(guidance=False),
        "vae": flux2_autoencoder(),
        "text_encoder": Qwen3ForCausalLM(qwen3_config(len(tokenizer), layers=4, width=16)),
    }
    return _write_flux2(folder, Flux2KleinPipeline, parts, tokenizer=tokenizer, is_distilled=distilled)


def write_flux2_dev(folder: Path) -> Path:
    pictures = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = byte_tokenizer(bos="<s>", eos="</s>", pad="<pad>", length=2048, extra=pictures, padding_side="left")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 4, "num_key_value_heads": 1}
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Mistral3Config(text_config={**text, **shape}, vision_config={**vision, **shape}, image_token_index=3)
    parts: dict[str, Any] = {
        "transformer": _flux2_transformer(guidance=True),
        "vae": flux2_autoencoder(),
        "text_encoder": Mistral3ForConditionalGeneration(config),
    }
    return _write_flux2(folder, Flux2Pipeline, parts, tokenizer=tokenizer)


def _flux2_transformer(*, guidance: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16 * len(TEXT_LAYERS),
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def _write_flux2(folder: Path, pipeline: type, parts: dict[str, Any], **others: Any) -> Path:
    redraw(parts.values())
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    pipeline(**parts, scheduler=scheduler, **others).save_pretrained(folder)
    return folder


def write_flux3(folder: Path, *, flow_map: bool = False) -> Path:
    tokenizer = qwen_tokenizer()
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = {
        **qwen3_config(len(tokenizer), layers=3, width=16).to_dict(),
        "model_type": "qwen3_vl_text",
        "rope_parameters": rotary,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    parts: dict[str, Any] = {
        "transformer": Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16 * len(TEXT_LAYERS),
            timestep_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
        "vae": flux2_autoencoder(),
        "text_encoder": Qwen3VLForConditionalGeneration(config),
    }
    redraw(parts.values())
    blocks = Flux3DistilledAutoBlocks() if flow_map else Flux3AutoBlocks()
    pipeline = blocks.init_pipeline()
    pipeline.update_components(**parts, tokenizer=tokenizer)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder
