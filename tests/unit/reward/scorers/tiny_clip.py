"""A tiny random CLIP in a folder, in the format of the published ones, and pictures for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from unirl.models.random_weights.parts import clip_config, clip_tokenizer, redraw
from unirl.reward.scorer import ScorerInput

SIDE, WIDTH = 32, 16
PROMPTS = ("a red fox", "", "ein Mädchen mit 风筝 🪁", "two cats on a sofa")


def tiny_clip(seed: int = 0, **text: object) -> transformers.CLIPModel:
    """Two layers, 16 numbers to a picture; text: settings of the text model's config."""
    config = transformers.CLIPConfig(
        text_config=clip_config(width=WIDTH).to_dict() | text,
        vision_config={
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 8,
            "projection_dim": WIDTH,
            **({"hidden_act": text["hidden_act"]} if "hidden_act" in text else {}),
        },
        projection_dim=WIDTH,
    )
    model = transformers.CLIPModel(config)
    redraw([model], seed)
    model.logit_scale.data = torch.tensor(4.6)
    return model


def save_clip(folder: Path, seed: int = 0, **text: object) -> str:
    tiny_clip(seed, **text).save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE).save_pretrained(folder)
    return str(folder)


def picture(height: int = 48, width: int = 48, seed: int = 0) -> np.ndarray:
    """Smooth noise: a resize that differs shows."""
    draws = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return draws // 2 + np.linspace(0, 127, width).astype(np.uint8)[None, :, None]


def samples() -> list[ScorerInput]:
    """Pictures of many sizes, each with a prompt."""
    sizes = [(48, 48), (64, 40), (33, 90), (32, 32), (1, 1), (3, 3), (1, 50)]
    pictures = [picture(*size, seed=row) for row, size in enumerate(sizes)]
    pictures.append(np.full((40, 40, 3), 128, np.uint8))
    return [
        ScorerInput(id=f"r0.p{row}/0", prompt=PROMPTS[row % len(PROMPTS)], image=image)
        for row, image in enumerate(pictures)
    ]
