"""FLUX.3 klein, and the flow map."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import FLUX_TEXT_LAYERS, flux2_autoencoder, qwen3_config, qwen_tokenizer, redraw


def write(folder: Path, *, flow_map: bool = False) -> Path:
    tokenizer = qwen_tokenizer()
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = {
        **qwen3_config(len(tokenizer), layers=3, width=16).to_dict(),
        "model_type": "qwen3_vl_text",
        "rope_parameters": rotary,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    parts: dict[str, Any] = {
        "transformer": diffusers.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16 * len(FLUX_TEXT_LAYERS),
            timestep_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
        "vae": flux2_autoencoder(),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(config),
    }
    redraw(parts.values())
    blocks = diffusers.Flux3DistilledAutoBlocks() if flow_map else diffusers.Flux3AutoBlocks()
    pipeline = blocks.init_pipeline()
    pipeline.update_components(**parts, tokenizer=tokenizer)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


CHECKPOINTS = {
    "flux3_klein": RandomCheckpoint("Flux3ModularPipeline", write),
    "flux3_klein_distilled": RandomCheckpoint("Flux3DistilledModularPipeline", partial(write, flow_map=True)),
}
