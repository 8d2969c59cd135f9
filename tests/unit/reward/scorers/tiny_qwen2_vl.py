"""A tiny Qwen2-VL that reward models are built on."""

from __future__ import annotations

from pathlib import Path

import transformers

from unirl.models.random_weights.parts import qwen_tokenizer

IMAGE, VIDEO = 5, 6  # the placeholders


def tiny_config(vocabulary: int) -> transformers.Qwen2VLConfig:
    return transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        vision_start_token_id=3,
        vision_end_token_id=4,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def write_base(folder: Path) -> Path:
    """The model before it was trained to judge, with the parts of its processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    transformers.Qwen2VLForConditionalGeneration(tiny_config(300)).save_pretrained(folder)
    qwen_tokenizer().save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return folder


def published(name: str) -> str:
    """The name of a weight in transformers 4.45, under which it was saved."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "model.", 1)
    return name.removeprefix("model.") if name.startswith("model.visual.") else name
