"""How fast scorers are on the tiny random models of their tests: what they cost beside a model's own arithmetic."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.unit.reward.scorers.blip import save_image_reward
from tests.unit.reward.scorers.test_aesthetic import save_aesthetic
from tests.unit.reward.scorers.test_clap import RATE, save_clap
from tests.unit.reward.scorers.test_hps import save_hps
from tests.unit.reward.scorers.test_hps_v3 import write_base, write_published
from tests.unit.reward.scorers.tiny_clip import save_clip
from tests.unit.reward.scorers.vision import write_model
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.aesthetic import LaionAesthetic
from unirl.reward.scorers.clap import CLAPScore
from unirl.reward.scorers.clip_score import CLIPScore
from unirl.reward.scorers.geneval2 import GenEval2
from unirl.reward.scorers.hps import HPSv2
from unirl.reward.scorers.hps_v3 import HPSv3
from unirl.reward.scorers.image_reward import ImageReward
from unirl.reward.scorers.jpeg import JpegIncompressibility
from unirl.reward.scorers.pick_score import PickScore, VideoPickScore
from unirl.reward.scorers.vqa_score import VQAScore

COUNT, SIDE, FRAMES = 16, 512, 8


def scorer_speeds(rounds: int = 3) -> dict[str, float]:
    """Samples a CPU second by scorer, the best of so many rounds, after one that loads the model."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    samples = _samples()
    with tempfile.TemporaryDirectory() as folder:
        return {type(scorer).__name__: _speed(scorer, samples, rounds) for scorer in _scorers(Path(folder))}


def _scorers(folder: Path) -> list[Scorer]:
    places = {name: folder / name for name in ("clip", "hps", "hps_v3", "base", "image", "aesthetic", "clap", "vision")}
    for place in places.values():
        place.mkdir()
    write_base(places["base"])
    write_published(places["hps_v3"])
    clip, vision = save_clip(places["clip"]), str(write_model(places["vision"], "qwen3_vl"))
    return [
        JpegIncompressibility(),
        PickScore(checkpoint=clip),
        VideoPickScore(checkpoint=clip, frames="uniform:4"),
        CLIPScore(checkpoint=clip),
        HPSv2(**save_hps(places["hps"])),
        HPSv3(checkpoint=str(places["hps_v3"]), base=str(places["base"]), dtype="float32"),
        ImageReward(**save_image_reward(places["image"])),
        LaionAesthetic(**save_aesthetic(places["aesthetic"])),
        CLAPScore(checkpoint=save_clap(places["clap"])),
        GenEval2(checkpoint=vision, dtype="float32"),
        VQAScore(checkpoint=vision, dtype="float32"),
    ]


def _samples() -> list[ScorerInput]:
    rng = np.random.default_rng(0)
    questions = [["How many cats are in the image?", "two"], ["Are there any cats in the image?", "Yes"]]
    return [
        ScorerInput(
            id=f"r0.p{row}/0",
            prompt="two cats on a sofa",
            image=rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8),
            video=rng.integers(0, 256, (FRAMES, SIDE, SIDE, 3), np.uint8),
            audio=rng.uniform(-1, 1, (1, 2 * RATE)).astype(np.float32),
            audio_rate=RATE,
            metadata={"vqa_list": questions},
        )
        for row in range(COUNT)
    ]


def _speed(scorer: Scorer, samples: list[ScorerInput], rounds: int) -> float:
    scorer.score(samples)
    times = []
    for _ in range(rounds):
        start = time.process_time()
        scorer.score(samples)
        times.append(time.process_time() - start)
    return len(samples) / min(times)
