"""A rollout scored whole, and chunk by chunk behind its generation, by a scorer in a process of its own.

The scorer takes as long for a chunk as the chunk takes to be generated: with k chunks the best there is to gain is
(k + 1) / 2k of the time, one half with many. Seconds are those of the clock; only their ratio within one run tells.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import torch

from benchmarks.diffusion_step import SIDE, TEXT, Brightness
from unirl.data.prompts import PromptRow, as_roots
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.observability.timing import PhaseTimer
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.trainer.scored import scored
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Sleeping(Scorer):
    """The mean level of a picture, `seconds` later."""

    seconds: float

    def score(self, samples: list[ScorerInput]) -> list[float]:
        time.sleep(self.seconds * len(samples))
        return [float(sample.picture.mean()) for sample in samples]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Median seconds: of a rollout and of its scores one after the other, and of both in `chunks` chunks."""

    chunks: int
    rollout: float
    reward: float
    chunked: float

    @property
    def ratio(self) -> float:
        """Of the time that one after the other takes."""
        return self.chunked / (self.rollout + self.reward)

    @property
    def best(self) -> float:
        """The least that the ratio can be: one chunk of the quicker side is not overlapped."""
        quick, slow = sorted((self.rollout, self.reward))
        return (quick / self.chunks + slow) / (quick + slow)


def measure_overlap(
    checkpoint: Path, placement: Placement, *, chunks: int, group: int, steps: int, repeats: int
) -> Overlap:
    """`chunks` prompts of `group` pictures each, a prompt a chunk."""
    torch.set_num_threads(1)
    sampling = DiffusionSamplingParams(steps=steps, height=SIDE, width=SIDE, seed=0)
    rows = [PromptRow(f"a picture of thing number {row}") for row in range(chunks)]
    request = Sample((as_roots(rows, 0),)).fork(group, sampling)
    with placement.slab() as slab:
        backend = slab.spawn(
            FSDPBackend,
            SD3(checkpoint=str(checkpoint), max_sequence_length=TEXT),
            DiffusionBackendConfig(compute_dtype="float32"),
            device=torch.device("cpu"),
            seed=0,
            total_steps=1,
            with_reference=False,
        )
        rollout = slab.spawn(TrainsideEngine, backend, Trainside(batch_size=group), DiffusionPipeline)
        reward = slab.spawn(RewardService, RewardConfig({"level": WeightedScorer(Brightness())}))
        first = _seconds(request, rollout, reward, [chunks])
        scorer = Sleeping(first["seconds/rollout"] / chunks / group)
        reward = slab.spawn(RewardService, RewardConfig({"level": WeightedScorer(scorer, time_limit=60.0)}))
        _seconds(request, rollout, reward, [chunks])  # its process starts
        laps = [
            [_seconds(request, rollout, reward, sizes) for sizes in ([chunks], [1] * chunks)] for _ in range(repeats)
        ]
    return Overlap(
        chunks,
        rollout=statistics.median(whole["seconds/rollout"] for whole, _ in laps),
        reward=statistics.median(whole["seconds/reward"] for whole, _ in laps),
        chunked=statistics.median(chunked["seconds/step"] for _, chunked in laps),
    )


def _seconds(
    request: Sample, rollout: Handle[TrainsideEngine], reward: Handle[RewardService], sizes: list[int]
) -> dict[str, float]:
    timer = PhaseTimer()
    scored(request, rollout, reward, sizes=sizes, max_invalid=0.0, timer=timer)
    return timer.lap()
