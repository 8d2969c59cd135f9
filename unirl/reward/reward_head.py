"""Qwen2-VL with a head on the hidden state of a token of its own: what reward models of its family share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from unirl.models.language.chat import Chat
from unirl.models.pictures import as_pil
from unirl.models.pretrained import resolve
from unirl.types.conversation import Message

_PICTURE = Path("picture")  # all that a chat template knows of one


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """A prompt up to the token whose hidden state is judged, and its picture in patches."""

    tokens: list[int]
    patches: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class RewardHead:
    """model: Qwen2VLModel; head: of float32, on hidden states; token: the id of the special token"""

    model: Any
    head: torch.nn.Module
    tokenizer: Any
    image_processor: Any
    token: int

    def read(self, picture: np.ndarray, text: str) -> Read:
        """A user's message: a picture `(H, W, 3)` uint8, then a text that holds the token once."""
        cut = self.image_processor(images=[as_pil(picture)], return_tensors="pt")
        row = Chat(self.tokenizer, None, {}).opened((Message("user", (_PICTURE, text)),))
        mark, config = self.model.config.image_token_id, self.model.config
        if row.count(mark) != 1 or row.count(self.token) != 1:
            names = self.tokenizer.decode([mark]), self.tokenizer.decode([self.token])
            raise ValueError(f"leave {names[0]} and {names[1]} out of prompts: the scorer sets them")
        features = int(cut["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
        at = row.index(mark)
        tokens = [*row[:at], *[mark] * features, *row[at + 1 : row.index(self.token) + 1]]
        longest = config.text_config.max_position_embeddings
        if len(tokens) > longest:
            raise ValueError(f"the picture and its prompt are {len(tokens)} tokens, the model reads {longest}")
        return Read(tokens, {name: cut[name] for name in ("pixel_values", "image_grid_thw")})

    def __call__(self, rows: list[Read]) -> torch.Tensor:
        """`(N, outputs)` float32: the head at the last token of each row.

        Positions are 0, 1, 2 ... on all three axes, pictures too: so these models were trained, whatever Qwen2-VL does.
        """
        device, longest = self.model.device, max(len(row.tokens) for row in rows)
        tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows], device=device)
        lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
        patches = {name: torch.cat([row.patches[name] for row in rows]).to(device) for name in rows[0].patches}
        patches["pixel_values"] = patches["pixel_values"].to(self.model.dtype)
        hidden = self.model(
            input_ids=tokens,
            attention_mask=(torch.arange(longest, device=device) < lengths[:, None]).long(),
            position_ids=torch.arange(longest, device=device).expand(3, len(rows), -1),
            use_cache=False,
            **patches,
        ).last_hidden_state
        return self.head(hidden[torch.arange(len(rows), device=device), lengths - 1].float())


def load_qwen2_vl(
    base: str, token: str, state: Mapping[str, torch.Tensor], *, pixels: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, Any]:
    """Model, tokenizer with one token more, and image processor.

    base:   config, tokenizer and image processor
    state:  weights by the names of transformers 4.45 or of today; those of the language head are not read
    pixels: area to which every picture is scaled, about
    """
    folder = resolve(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([transformers.AddedToken(token, special=True, normalized=False)])
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type != "qwen2_vl":
        raise ValueError(f"base {base} is a {config.model_type}, this scorer is built on qwen2_vl")
    config.text_config.vocab_size = len(tokenizer)
    images: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images.size = dataclasses.replace(images.size, shortest_edge=pixels, longest_edge=pixels)
    named = {_renamed(name): value for name, value in state.items() if not name.startswith("lm_head.")}
    kind: Any = transformers.Qwen2VLModel
    # Mismatches are reported with the others, below, rather than by an error of the library's own.
    settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(None, config=config, state_dict=named, dtype=dtype, **settings)
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"], *(row[0] for row in found["mismatched_keys"])})
    if wrong:
        raise ValueError(
            f"the weights are not those of {base} with {token}: {len(wrong)} are missing, unknown or of another shape, "
            f"{wrong[:3]}"
        )
    return model.to(device).eval(), tokenizer, images


def _renamed(name: str) -> str:
    """`visual.x` and `model.x` of transformers 4.45 as `visual.x` and `language_model.x` of today."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
