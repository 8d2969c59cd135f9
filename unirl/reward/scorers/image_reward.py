"""ImageReward (arXiv 2304.05977): BLIP trained on how people rank pictures of a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from unirl.reward.blip import load_blip
from unirl.reward.clip import pixels
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.prompts import PromptTokens
from unirl.reward.scorer import ScorerInput
from unirl.reward.weights import affine, check_file, file_of, read_weights

_WEIGHTS, _TEXT_CONFIG = "ImageReward.pt", "med_config.json"
_TOKENS = 35
# Of the head's output, over the pictures it was trained on.
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072


@dataclasses.dataclass(frozen=True, eq=False)
class _Loaded:
    vision: Any
    text: Any
    head: torch.nn.Linear
    prompts: PromptTokens
    image_processor: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageReward(ModelScorer):
    """-2.3 to 2, with mean 0 and standard deviation 1 over the pictures of its training; higher is better.

    A prompt is cut after 35 tokens. BLIP with ViT-L/16 at 224 pixels and BERT base, 446 M parameters, Apache-2.0.

    checkpoint: hub id or folder of `ImageReward.pt` and `med_config.json`
    tokenizer:  hub id or folder
    """

    reads = frozenset({"picture"})

    card = Card(
        looks_at="image with prompt",
        range="about -2.3 to 2",
        unit="standard deviations",
        licence="Apache-2.0",
        checkpoints=("zai-org/ImageReward",),
        preprocessing="pil-bicubic-crop",
    )

    checkpoint: str = "zai-org/ImageReward"
    tokenizer: str = "google-bert/bert-base-uncased"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (_WEIGHTS, _TEXT_CONFIG):
            check_file(self.checkpoint, name)

    def load(self, device: torch.device, dtype: torch.dtype) -> _Loaded:
        file = file_of(self.checkpoint, _WEIGHTS)
        state = read_weights(file)
        blip = {name.removeprefix("blip."): value for name, value in state.items()}
        vision, text = load_blip(blip, file_of(self.checkpoint, _TEXT_CONFIG), str(file))
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer)
        # BLIP's two tokens besides BERT's. A prompt still starts with [CLS].
        tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)
        side = vision.config.image_size
        return _Loaded(
            vision=vision.to(device, dtype).eval(),
            text=text.to(device, dtype).eval(),
            head=affine(state, "mlp.layers.", str(file)).to(device),
            prompts=PromptTokens(tokenizer, _TOKENS),
            image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side),
        )

    def modules(self, loaded: _Loaded) -> Iterable[torch.nn.Module]:
        return [loaded.vision, loaded.text, loaded.head]

    def judge(self, loaded: _Loaded, samples: list[ScorerInput]) -> list[float]:
        values = pixels(loaded.image_processor, [sample.picture for sample in samples])
        seen = loaded.vision(values.to(loaded.vision.device, loaded.vision.dtype)).last_hidden_state
        tokens = loaded.prompts([sample.prompt for sample in samples])
        read = loaded.text(
            **{name: ids.to(loaded.text.device) for name, ids in tokens.items()},
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        )
        ratings = loaded.head(read.last_hidden_state[:, 0].float())[:, 0]
        return ((ratings - _MEAN) / _STD).tolist()
