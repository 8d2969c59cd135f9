"""What scorers built on CLIP share: a checkpoint with its preprocessing, and unit vectors of pictures and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from unirl.models.pretrained import check_checkpoint, resolve
from unirl.reward.model_scorer import ModelScorer
from unirl.reward.prompts import PromptTokens
from unirl.reward.weights import load_whole

# Of the pictures that CLIP was trained on, by channel.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """A CLIPModel; embeddings are float32 unit vectors `(N, D)` on its device.

    image_processor: makes pixels of pictures, None where the scorer does that itself
    """

    model: Any
    prompts: PromptTokens
    image_processor: Any = None

    def embed_pictures(self, pictures: Sequence[np.ndarray]) -> torch.Tensor:
        """Of pictures `(H, W, 3)` uint8, of any sizes."""
        return self.embed_pixels(pixels(self.image_processor, pictures))

    def embed_pixels(self, values: torch.Tensor) -> torch.Tensor:
        """Of `(N, 3, side, side)`, normalised as the model wants them."""
        values = values.to(self.model.device, self.model.dtype)
        # Not get_image_features: what that returns has changed with transformers 5.
        features = self.model.visual_projection(self.model.vision_model(pixel_values=values).pooler_output)
        return torch.nn.functional.normalize(features.float(), dim=-1)

    def embed_prompts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Of texts."""
        tokens = {name: ids.to(self.model.device) for name, ids in self.prompts(prompts).items()}
        features = self.model.text_projection(self.model.text_model(**tokens).pooler_output)
        return torch.nn.functional.normalize(features.float(), dim=-1)


def pixels(image_processor: Any, pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """`(N, 3, side, side)` of pictures `(H, W, 3)` uint8."""
    # Where the channels are is not left to a guess, which goes wrong for pictures 1 or 3 pixels high.
    return image_processor(list(pictures), input_data_format="channels_last", return_tensors="pt").pixel_values


def load_clip(checkpoint: str, device: torch.device, dtype: torch.dtype) -> Clip:
    """The saved CLIPModel, tokenizer and image processor."""
    folder = resolve(checkpoint)
    model = load_whole(transformers.CLIPModel, checkpoint, device, dtype)
    length = model.config.text_config.max_position_embeddings
    # The PIL backend by name: where torchvision is installed another one would be taken, and other scores.
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Clip(model, PromptTokens(transformers.AutoTokenizer.from_pretrained(folder), length), image_processor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipScorer(ModelScorer):
    """checkpoint: hub id or folder of a CLIPModel with its tokenizer and image processor."""

    reads = frozenset({"picture"})

    checkpoint: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_checkpoint(self.checkpoint, "CLIPModel", index="config.json")

    def load(self, device: torch.device, dtype: torch.dtype) -> Clip:
        return load_clip(self.checkpoint, device, dtype)

    def modules(self, loaded: Clip) -> Iterable[torch.nn.Module]:
        return [loaded.model]
