"""Qwen-Image-Edit 2509 and 2511."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import diffusers
import transformers

from unirl.models.pictures import picture_processor
from unirl.models.random_weights.folders import RandomCheckpoint
from unirl.models.random_weights.parts import qwen_tokenizer
from unirl.models.random_weights.qwen_image import parts


def write(folder: Path, *, zero_cond_t: bool) -> Path:
    """zero_cond_t: as 2511 has it"""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    processor = picture_processor(transformers.Qwen2VLProcessor, pictures, qwen_tokenizer())
    diffusers.QwenImageEditPlusPipeline(**parts(zero_cond_t=zero_cond_t), processor=processor).save_pretrained(folder)
    return folder


CHECKPOINTS = {
    "qwen_image_edit_2509": RandomCheckpoint("QwenImageEditPlusPipeline", partial(write, zero_cond_t=False)),
    "qwen_image_edit_2511": RandomCheckpoint("QwenImageEditPlusPipeline", partial(write, zero_cond_t=True)),
}
