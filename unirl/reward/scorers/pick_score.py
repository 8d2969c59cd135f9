"""PickScore (arXiv 2305.01569): CLIP trained on which of two pictures people picked for a prompt."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import torch

from unirl.reward.clip import Clip, ClipScorer
from unirl.reward.model_scorer import Card
from unirl.reward.scorer import ScorerInput

_FRAMES = re.compile(r"first|middle|uniform:[1-9]\d*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PickScore(ClipScorer):
    """Logit of CLIP, `exp(logit_scale) * cos(prompt, picture)`: 18 to 24 as a rule, higher is better.

    Flow-GRPO reports it divided by 26. Pictures of one prompt differ by 0.3 to 1; those of two do not compare.
    A prompt is cut after 77 tokens. CLIP ViT-H/14, 986 M parameters, MIT.
    """

    card = Card(
        looks_at="image with prompt",
        range="about 18 to 24",
        unit="CLIP logit, 100 times a cosine",
        licence="MIT",
        checkpoints=("yuvalkirstain/PickScore_v1",),
        preprocessing="pil-bicubic-crop",
    )

    checkpoint: str = "yuvalkirstain/PickScore_v1"

    def judge(self, loaded: Clip, samples: list[ScorerInput]) -> list[float]:
        pictures = loaded.embed_pictures([sample.picture for sample in samples])
        prompts = loaded.embed_prompts([sample.prompt for sample in samples])
        return (_scale(loaded) * (pictures * prompts).sum(-1)).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPickScore(PickScore):
    """PickScore of frames of a video; a picture is a video of one frame.

    frames: first; middle, that is `F // 2` of F; or uniform:k, the middles of k equal parts (of a shorter video, all)
    over:   mean or min of the frames' scores

    What is between the frames, and that anything moves, does not count.
    """

    reads = frozenset({"frames"})

    frames: str = "first"
    over: Literal["mean", "min"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _FRAMES.fullmatch(self.frames):
            raise ValueError(f"frames must be first, middle or uniform:k, such as uniform:4, got {self.frames!r}")

    @property
    def variant(self) -> str:
        return f"{self.card.preprocessing}-{self.frames}-{self.over}"

    def judge(self, loaded: Clip, samples: list[ScorerInput]) -> list[float]:
        chosen = [[sample.frames[row] for row in frame_rows(self.frames, len(sample.frames))] for sample in samples]
        counts = [len(frames) for frames in chosen]
        frames = [frame for frames in chosen for frame in frames]
        chunks = range(0, len(frames), self.batch_size)
        pictures = torch.cat([loaded.embed_pictures(frames[start : start + self.batch_size]) for start in chunks])
        prompts = loaded.embed_prompts([sample.prompt for sample in samples])
        prompts = prompts.repeat_interleave(torch.tensor(counts, device=prompts.device), dim=0)
        scores = (_scale(loaded) * (pictures * prompts).sum(-1)).split(counts)
        return [(rows.mean() if self.over == "mean" else rows.min()).item() for rows in scores]


def frame_rows(frames: str, count: int) -> list[int]:
    """Which of `count` frames: `frame_rows("uniform:2", 8) == [2, 6]`."""
    if frames == "first":
        return [0]
    parts = 1 if frames == "middle" else min(int(frames.removeprefix("uniform:")), count)
    return [(2 * part + 1) * count // (2 * parts) for part in range(parts)]


def _scale(clip: Clip) -> torch.Tensor:
    return clip.model.logit_scale.float().exp()
