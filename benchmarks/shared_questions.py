"""GenEval 2 with and without its shared prefix: the questions about a picture in one row, or the picture once for each.

The model is a random Qwen3-VL of a few layers; a ratio near that of the tokens is what a larger one would see.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.geneval2 import GenEval2

QUESTIONS = [
    ["How many cats are in the image?", "two"],
    ["Are there any cats in the image?", "Yes"],
    ["Are the cats striped?", "Yes"],
    ["How many boxes are in the image?", "three"],
    ["Are there any boxes in the image?", "Yes"],
    ["Are the boxes red?", "Yes"],
    ["Are the cats on top of the boxes?", "Yes"],
]


@dataclasses.dataclass(frozen=True)
class SharedQuestions:
    """CPU seconds of one picture of 512 pixels with its questions; the largest difference of a probability."""

    shared: float
    apart: float
    difference: float


def shared_questions(rounds: int = 3) -> SharedQuestions:
    """The least of so many rounds, after one that is not counted."""
    torch.set_num_threads(1)
    scorer = GenEval2(checkpoint="random:qwen3_vl", dtype="float32", device="cpu", min_pixels=512**2, max_pixels=512**2)
    picture = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    together = [_sample(picture, QUESTIONS)]
    apart = [_sample(picture, [question]) for question in QUESTIONS]
    times: tuple[list[float], list[float]] = ([], [])
    rows: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for side, samples in enumerate((together, apart)):
            start = time.process_time()
            rows[side][:] = [atom for row in scorer.probabilities(samples) for atom in row]
            times[side].append(time.process_time() - start)
    difference = max(abs(left - right) for left, right in zip(*rows, strict=True))
    return SharedQuestions(min(times[0][1:]), min(times[1][1:]), difference)


def _sample(picture: np.ndarray, questions: list[list[str]]) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt="two cats", image=picture, metadata={"vqa_list": questions})
