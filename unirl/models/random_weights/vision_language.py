"""Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import transformers

from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer, redraw
from unirl.models.random_weights.qwen_image import qwen2_5_vl_config
from unirl.models.random_weights.qwen_image_2_1 import qwen3_vl_config

_CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def write(folder: Path, *, name: str) -> Path:
    """The model, and the parts of its processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config: Any = {"qwen2_5_vl": qwen2_5_vl_config, "qwen3_vl": qwen3_vl_config}[name]()
    model: Any = getattr(transformers, _CLASSES[name])(config)
    redraw([model])
    model.save_pretrained(folder)
    qwen_tokenizer(padding_side="left").save_pretrained(folder)
    patch = config.vision_config.patch_size
    size = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    Qwen2VLImageProcessorPil(patch_size=patch, size=size).save_pretrained(folder)
    return folder


CHECKPOINTS = {name: RandomCheckpoint(found, partial(write, name=name)) for name, found in _CLASSES.items()}
