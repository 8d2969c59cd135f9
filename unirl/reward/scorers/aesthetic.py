"""LAION's aesthetic predictor v2: how much would people like the picture, whatever was asked for?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from unirl.reward.clip import Clip, ClipScorer
from unirl.reward.model_scorer import Card
from unirl.reward.scorer import ScorerInput
from unirl.reward.weights import affine, check_file, file_of, read_weights


@dataclasses.dataclass(frozen=True, eq=False)
class _Loaded:
    clip: Clip
    head: torch.nn.Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaionAesthetic(ClipScorer):
    """A rating from 1 to 10: 4.5 to 6.5 as a rule, higher is better. The prompt does not count.

    An affine map of CLIP's unit vector: five linear layers were trained without activation between them.
    CLIP ViT-L/14 at 224 pixels (MIT, 428 M parameters, loaded whole) and 769 numbers (Apache-2.0).

    head: hub id or folder of the five layers
    file: its name there, with the names of `sac+logos+ava1-l14-linearMSE.pth`, `layers.0.weight` and so on
    """

    card = Card(
        looks_at="image without prompt",
        range="about 4.5 to 6.5",
        unit="rating, 1 to 10",
        licence="Apache-2.0",
        checkpoints=("openai/clip-vit-large-patch14", "trl-lib/ddpo-aesthetic-predictor"),
        preprocessing="pil-bicubic-crop",
    )

    checkpoint: str = "openai/clip-vit-large-patch14"
    head: str = "trl-lib/ddpo-aesthetic-predictor"
    file: str = "aesthetic-model.pth"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file(self.head, self.file)

    def load(self, device: torch.device, dtype: torch.dtype) -> _Loaded:
        file = file_of(self.head, self.file)
        # The head stays float32: in bfloat16 a score is off by 0.02.
        head = affine(read_weights(file), "layers.", str(file)).to(device)
        return _Loaded(super().load(device, dtype), head)

    def modules(self, loaded: _Loaded) -> Iterable[torch.nn.Module]:
        return [loaded.clip.model, loaded.head]

    def judge(self, loaded: _Loaded, samples: list[ScorerInput]) -> list[float]:
        return loaded.head(loaded.clip.embed_pictures([sample.picture for sample in samples]))[:, 0].tolist()
