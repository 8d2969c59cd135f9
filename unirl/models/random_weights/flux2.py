"""FLUX.2: klein, guided and distilled, and dev."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import (
    FLUX_TEXT_LAYERS,
    byte_tokenizer,
    flux2_autoencoder,
    qwen3_config,
    qwen_tokenizer,
    redraw,
)


def write_klein(folder: Path, *, distilled: bool = False) -> Path:
    tokenizer = qwen_tokenizer()
    parts: dict[str, Any] = {
        "transformer": _transformer(guidance=False),
        "vae": flux2_autoencoder(),
        "text_encoder": transformers.Qwen3ForCausalLM(qwen3_config(len(tokenizer), layers=4, width=16)),
    }
    return _write(folder, diffusers.Flux2KleinPipeline, parts, tokenizer=tokenizer, is_distilled=distilled)


def write_dev(folder: Path) -> Path:
    pictures = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    tokenizer = byte_tokenizer(bos="<s>", eos="</s>", pad="<pad>", length=2048, extra=pictures, padding_side="left")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 4, "num_key_value_heads": 1}
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(
        text_config={**text, **shape}, vision_config={**vision, **shape}, image_token_index=3
    )
    parts: dict[str, Any] = {
        "transformer": _transformer(guidance=True),
        "vae": flux2_autoencoder(),
        "text_encoder": transformers.Mistral3ForConditionalGeneration(config),
    }
    return _write(folder, diffusers.Flux2Pipeline, parts, tokenizer=tokenizer)


def _transformer(*, guidance: bool) -> diffusers.Flux2Transformer2DModel:
    return diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16 * len(FLUX_TEXT_LAYERS),
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def _write(folder: Path, pipeline: type, parts: dict[str, Any], **others: Any) -> Path:
    redraw(parts.values())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    pipeline(**parts, scheduler=scheduler, **others).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "flux2_klein": RandomCheckpoint("Flux2KleinPipeline", write_klein),
    "flux2_klein_distilled": RandomCheckpoint("Flux2KleinPipeline", partial(write_klein, distilled=True)),
    "flux2_dev": RandomCheckpoint("Flux2Pipeline", write_dev),
}
