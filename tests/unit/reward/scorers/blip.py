"""ImageReward in miniature: random weights under the published names, and the published arithmetic on them."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import conv2d, gelu, layer_norm, linear, scaled_dot_product_attention

from tests.unit.reward.scorers.affine_heads import head_state

SIDE, PATCH, SEEN, READ, HEADS = 32, 16, 128, 32, 2
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

State = Mapping[str, torch.Tensor]


def bert_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """WordPiece of single letters, with the special tokens of BERT."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = string.ascii_lowercase + string.punctuation
    vocabulary = {token: row for row, token in enumerate([*_SPECIAL, *letters, *(f"##{each}" for each in letters)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def published_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """What `ImageReward.pt` holds, with two layers of each kind."""
    vision = {"cls_token": (1, 1, SEEN), "pos_embed": (1, 5, SEEN), **_pair("patch_embed.proj", SEEN, 3, PATCH, PATCH)}
    text = {
        "embeddings.word_embeddings.weight": (len(bert_tokenizer()) + 2, READ),
        "embeddings.position_embeddings.weight": (40, READ),
        **_norm("embeddings.LayerNorm", READ),
    }
    for layer in range(2):
        block = f"blocks.{layer}"
        vision |= _norm(f"{block}.norm1", SEEN) | _norm(f"{block}.norm2", SEEN)
        vision |= _pair(f"{block}.attn.qkv", 3 * SEEN, SEEN) | _pair(f"{block}.attn.proj", SEEN, SEEN)
        vision |= _pair(f"{block}.mlp.fc1", 64, SEEN) | _pair(f"{block}.mlp.fc2", SEEN, 64)
        block = f"encoder.layer.{layer}"
        for kind, width in (("attention", READ), ("crossattention", SEEN)):
            text |= _pair(f"{block}.{kind}.self.query", READ, READ)
            text |= _pair(f"{block}.{kind}.self.key", READ, width) | _pair(f"{block}.{kind}.self.value", READ, width)
            text |= _pair(f"{block}.{kind}.output.dense", READ, READ) | _norm(f"{block}.{kind}.output.LayerNorm", READ)
        text |= _pair(f"{block}.intermediate.dense", 48, READ) | _pair(f"{block}.output.dense", READ, 48)
        text |= _norm(f"{block}.output.LayerNorm", READ)
    shapes = {f"blip.visual_encoder.{name}": shape for name, shape in (vision | _norm("norm", SEEN)).items()}
    shapes |= {f"blip.text_encoder.{name}": shape for name, shape in text.items()}
    draws = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=draws) / max(shape[-1], 9) ** 0.5 for name, shape in shapes.items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    state |= {"blip.vision_proj.weight": torch.zeros(8, SEEN)}  # of the pretraining, without use here
    return state | head_state(torch.randn(READ, generator=draws), 0.5, "mlp.layers.")


def save_image_reward(folder: Path, seed: int = 0) -> dict[str, Any]:
    torch.save(published_state(seed), folder / "ImageReward.pt")
    config = {"num_attention_heads": HEADS, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0}
    (folder / "med_config.json").write_text(json.dumps(config))
    bert_tokenizer().save_pretrained(folder / "tokenizer")
    return {"checkpoint": str(folder), "tokenizer": str(folder / "tokenizer")}


def rating(state: State, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """The score of one picture `(1, 3, side, side)` and one prompt `(1, L)`, step by step in float64."""
    state = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    x = _read(state, "blip.text_encoder.", ids, mask, _see(state, "blip.visual_encoder.", pixels.double()))[:, 0]
    for row in (0, 2, 4, 6, 7):
        x = _linear(state, f"mlp.layers.{row}", x)
    return ((x.item()) - 0.16717362830052426) / 1.0333394966054072


def _see(state: State, at: str, pixels: torch.Tensor) -> torch.Tensor:
    patches = conv2d(pixels, state[f"{at}patch_embed.proj.weight"], state[f"{at}patch_embed.proj.bias"], PATCH)
    x = torch.cat([state[f"{at}cls_token"], patches.flatten(2).transpose(1, 2)], dim=1) + state[f"{at}pos_embed"]
    for layer in range(2):
        block = f"{at}blocks.{layer}."
        q, k, v = _linear(state, f"{block}attn.qkv", _normed(state, f"{block}norm1", x, 1e-6)).chunk(3, dim=-1)
        x = x + _linear(state, f"{block}attn.proj", _attend(q, k, v))
        wide = gelu(_linear(state, f"{block}mlp.fc1", _normed(state, f"{block}norm2", x, 1e-6)))
        x = x + _linear(state, f"{block}mlp.fc2", wide)
    return _normed(state, f"{at}norm", x, 1e-6)


def _read(state: State, at: str, ids: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    positions = state[f"{at}embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = _normed(state, f"{at}embeddings.LayerNorm", state[f"{at}embeddings.word_embeddings.weight"][ids] + positions)
    for layer in range(2):
        block = f"{at}encoder.layer.{layer}."
        for kind, source, kept in (("attention", None, mask[:, None, None].bool()), ("crossattention", seen, None)):
            keys = x if source is None else source
            parts = zip(("query", "key", "value"), (x, keys, keys), strict=True)
            q, k, v = (_linear(state, f"{block}{kind}.self.{part}", values) for part, values in parts)
            y = _linear(state, f"{block}{kind}.output.dense", _attend(q, k, v, kept))
            x = _normed(state, f"{block}{kind}.output.LayerNorm", y + x)
        wide = gelu(_linear(state, f"{block}intermediate.dense", x))
        x = _normed(state, f"{block}output.LayerNorm", _linear(state, f"{block}output.dense", wide) + x)
    return x


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, kept).transpose(1, 2).flatten(2)


def _linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _normed(state: State, name: str, x: torch.Tensor, eps: float = 1e-12) -> torch.Tensor:
    return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def _pair(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return _pair(name, width)
