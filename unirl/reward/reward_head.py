"""Qwen2-VL or Qwen2.5-VL with a head on the hidden states of tokens of its own: what such reward models share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from unirl.models.language.chat import Chat
from unirl.models.pictures import as_pil
from unirl.models.pretrained import resolve
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.reward.weights import fill
from unirl.types.conversation import Message

_PICTURE = Path("picture")  # all that a chat template knows of one
_MODELS = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}

# What the model is shown, pictures `(H, W, 3)` or videos `(F, H, W, 3)` uint8, and the text that follows.
Shown = tuple[Sequence[np.ndarray], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """A prompt up to the last token whose hidden state is judged, and what it shows in patches.

    places: where the judged tokens stand
    """

    tokens: list[int]
    places: list[int]
    patches: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class RewardHead:
    """model: Qwen2VLModel or Qwen2_5_VLModel; head: of float32, on hidden states; tokens: ids of the special ones"""

    model: Any
    head: torch.nn.Module
    tokenizer: Any
    image_processor: Any
    tokens: tuple[int, ...]

    def outputs(
        self, samples: list[ScorerInput], message: Callable[[ScorerInput], Shown]
    ) -> list[torch.Tensor | Unscored]:
        """`(tokens, outputs)` of each sample; one of which no message can be made costs the others nothing."""
        rows = list[Read | Unscored]()
        for sample in samples:
            try:
                rows.append(self.read(*message(sample)))
            except ValueError as error:
                rows.append(Unscored(str(error)))
        good = [row for row in rows if isinstance(row, Read)]
        found = iter(self(good) if good else [])
        return [row if isinstance(row, Unscored) else next(found) for row in rows]

    def read(self, shown: Sequence[np.ndarray], text: str) -> Read:
        """A user's message: what is shown, then a text that holds each token once.

        Pictures are scaled; videos are not, and must have an even number of frames.
        """
        cut = [self._cut(one) for one in shown]
        row = Chat(self.tokenizer, None, {}).opened((Message("user", (*[_PICTURE for _ in shown], text)),))
        mark, config = self.model.config.image_token_id, self.model.config
        if row.count(mark) != len(shown) or any(row.count(token) != 1 for token in self.tokens):
            names = " and ".join(self.tokenizer.decode([token]) for token in (mark, *self.tokens))
            raise ValueError(f"leave {names} out of prompts: the scorer sets them")
        merged = config.vision_config.spatial_merge_size**2
        features = iter([int(one["image_grid_thw"].prod()) // merged for one in cut])
        tokens = [copy for token in row for copy in ([mark] * next(features) if token == mark else [token])]
        places = [tokens.index(token) for token in self.tokens]
        longest, length = config.text_config.max_position_embeddings, max(places) + 1
        if length > longest:
            kinds = "video" if shown[0].ndim == 4 else "picture" if len(shown) == 1 else "pictures"
            raise ValueError(f"the {kinds} and the prompt are {length} tokens, the model reads {longest}")
        patches = {name: torch.cat([one[name] for one in cut]) for name in cut[0]}
        return Read(tokens[:length], places, patches)

    def _cut(self, shown: np.ndarray) -> dict[str, torch.Tensor]:
        """In patches: of a video, each of two frames."""
        frames = [as_pil(frame) for frame in (shown if shown.ndim == 4 else shown[None])]
        cut = self.image_processor(images=frames, do_resize=shown.ndim == 3, return_tensors="pt")
        patches, grids = cut["pixel_values"], cut["image_grid_thw"]
        if shown.ndim == 4:
            # The processor doubles each frame: `(pairs, 2, patches, colours, copies, pixels)`.
            copies = patches.unflatten(0, (len(frames) // 2, 2, -1)).unflatten(-1, (3, 2, -1))
            patches = torch.stack([copies[:, 0, :, :, 0], copies[:, 1, :, :, 1]], dim=-2).flatten(2).flatten(0, 1)
            grids = torch.tensor([[len(frames) // 2, *grids[0, 1:].tolist()]])
        return {"pixel_values": patches, "image_grid_thw": grids}

    def __call__(self, rows: list[Read]) -> torch.Tensor:
        """`(N, tokens, outputs)` float32: the head at the judged tokens of each row.

        Positions are 0, 1, 2 ... on all three axes, pictures too: so these models were trained, whatever Qwen2-VL does.
        A video goes where a picture would: its features take the place of the marks, whichever these are.
        """
        device, longest = self.model.device, max(len(row.tokens) for row in rows)
        tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows], device=device)
        lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
        places = torch.tensor([row.places for row in rows], device=device)
        patches = {name: torch.cat([row.patches[name] for row in rows]).to(device) for name in rows[0].patches}
        patches["pixel_values"] = patches["pixel_values"].to(self.model.dtype)
        hidden = self.model(
            input_ids=tokens,
            attention_mask=(torch.arange(longest, device=device) < lengths[:, None]).long(),
            position_ids=torch.arange(longest, device=device).expand(3, len(rows), -1),
            use_cache=False,
            **patches,
        ).last_hidden_state
        return self.head(hidden[torch.arange(len(rows), device=device)[:, None], places].float())


def gaussian_head(width: int) -> torch.nn.Module:
    """Mean and logarithm of the spread of a score, from a hidden state `(..., width)`."""
    return torch.nn.Sequential(
        torch.nn.Linear(width, 1024),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.05),
        torch.nn.Linear(1024, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 2),
    )


def load_reward_heads(
    base: str,
    tokens: tuple[str, ...],
    state: Mapping[str, torch.Tensor],
    heads: Mapping[str, Callable[[int], torch.nn.Module]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    pixels: int | None = None,
) -> list[RewardHead]:
    """One model with each of its heads.

    base:   config, tokenizer and image processor
    tokens: that the tokenizer of the base lacks
    state:  all weights, those of the model by the names of transformers 4.45 or of today
    heads:  the name of each in `state`, and what makes it from the width of the model
    pixels: area to which every picture is scaled, about
    """
    rest, own = dict(state), dict[str, dict[str, torch.Tensor]]()
    for name in heads:
        names = [full for full in rest if full.startswith(f"{name}.")]
        own[name] = {full.removeprefix(f"{name}."): rest.pop(full) for full in names}
    model, tokenizer, images = _load(base, tokens, rest, device=device, dtype=dtype)
    if pixels is not None:
        images.size = dataclasses.replace(images.size, shortest_edge=pixels, longest_edge=pixels)
    ids, loaded = tuple(tokenizer.convert_tokens_to_ids(list(tokens))), []
    for name, make in heads.items():
        head = make(model.config.text_config.hidden_size)
        fill(head, own[name], name)
        loaded.append(RewardHead(model, head.float().to(device).eval(), tokenizer, images, ids))
    return loaded


def _load(
    base: str, tokens: tuple[str, ...], state: Mapping[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, Any]:
    """Model, tokenizer and image processor; weights of a language head are not read."""
    folder = resolve(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([transformers.AddedToken(token, special=True, normalized=False) for token in tokens])
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in _MODELS:
        raise ValueError(f"base {base} is a {config.model_type}, this scorer is built on {' or '.join(_MODELS)}")
    config.text_config.vocab_size = len(tokenizer)
    images: Any = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    named = {_renamed(name): value for name, value in state.items() if not name.startswith("lm_head.")}
    kind: Any = getattr(transformers, _MODELS[config.model_type])
    # Mismatches are reported with the others, below, rather than by an error of the library's own.
    settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = kind.from_pretrained(None, config=config, state_dict=named, dtype=dtype, **settings)
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"], *(row[0] for row in found["mismatched_keys"])})
    if wrong:
        raise ValueError(
            f"the weights are not those of {base} with {', '.join(tokens)}: {len(wrong)} are missing, unknown or of "
            f"another shape, {wrong[:3]}"
        )
    return model.to(device).eval(), tokenizer, images


def _renamed(name: str) -> str:
    """`visual.x` and `model.x` of transformers 4.45 as `visual.x` and `language_model.x` of today."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return f"language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
