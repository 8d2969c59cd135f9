"""BLIP's encoder of a picture with a prompt, from the weights of the original code under the names of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from unirl.reward.weights import fill

_HEAD = 64  # width of an attention head in a ViT
_VISION = "visual_encoder."
_TEXT = "text_encoder."
_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(norm1|attn\.qkv|attn\.proj|norm2|mlp\.fc1|mlp\.fc2)")
_PARTS = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
}


def load_blip(state: Mapping[str, torch.Tensor], text_config: Path, source: str) -> tuple[Any, Any]:
    """The vision and the text model of `visual_encoder.*` and `text_encoder.*`.

    text_config: json of a BertConfig (`med_config.json`); sizes are those of the weights
    """
    names = {name: value for name, value in state.items() if name.startswith(_VISION)}
    vision = {_vision_name(name.removeprefix(_VISION)): value for name, value in names.items()}
    text = {name.removeprefix(_TEXT): value for name, value in state.items() if name.startswith(_TEXT)}
    text.pop("embeddings.position_ids", None)  # counts 0, 1, 2, ...: not a weight
    models: tuple[Any, Any] = (
        transformers.BlipVisionModel(_vision_config(vision, source)),
        transformers.BlipTextModel(_text_config(text, text_config, source), add_pooling_layer=False),
    )
    for model, weights in zip(models, (vision, text), strict=True):
        fill(model, weights, source)
    return models


def _vision_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    block = _BLOCK.fullmatch(stem)
    if block is not None:
        layer, part = block.groups()
        return f"encoder.layers.{layer}.{_PARTS.get(part, part)}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else _NAMES.get(name, name)


def _vision_config(state: Mapping[str, torch.Tensor], source: str) -> transformers.BlipVisionConfig:
    patches = _weight(state, "embeddings.patch_embedding.weight", source)
    width, patch = patches.shape[0], patches.shape[-1]
    positions = _weight(state, "embeddings.position_embedding", source).shape[1]
    return transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=_weight(state, "encoder.layers.0.mlp.fc1.weight", source).shape[0],
        num_hidden_layers=_layers(state, "encoder.layers."),
        num_attention_heads=width // _HEAD,
        image_size=patch * round((positions - 1) ** 0.5),
        patch_size=patch,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
    )


def _text_config(state: Mapping[str, torch.Tensor], file: Path, source: str) -> transformers.BlipTextConfig:
    saved = json.loads(file.read_text())
    vocabulary, width = _weight(state, "embeddings.word_embeddings.weight", source).shape
    return transformers.BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=_weight(state, "encoder.layer.0.crossattention.self.key.weight", source).shape[1],
        intermediate_size=_weight(state, "encoder.layer.0.intermediate.dense.weight", source).shape[0],
        num_hidden_layers=_layers(state, "encoder.layer."),
        num_attention_heads=saved["num_attention_heads"],
        max_position_embeddings=len(_weight(state, "embeddings.position_embeddings.weight", source)),
        hidden_act=saved["hidden_act"],
        layer_norm_eps=saved["layer_norm_eps"],
        pad_token_id=saved["pad_token_id"],
    )


def _weight(state: Mapping[str, torch.Tensor], name: str, source: str) -> torch.Tensor:
    if name not in state:
        raise ValueError(f"{source} holds no weights of BLIP: {name} is missing, there are {sorted(state)[:3]}")
    return state[name]


def _layers(state: Mapping[str, torch.Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
