"""A rollout scored whole, and chunk by chunk behind its generation, by a scorer in a process of its own.

The scorer takes as long for a chunk as the chunk takes to be generated: with k chunks the best there is to gain is
(k + 1) / 2k of the time, one half with many. Seconds are those of the clock; only their ratio within one run tells.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.diffusion_step import SIDE, TEXT
from unirl.data.prompts import PromptRow, as_roots
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
from unirl.types.sample import Part, Sample
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
    """Median seconds of a rollout with its scores; `chunk`: what one of the `chunks` takes to be generated."""

    chunks: int
    chunk: float
    whole: float
    chunked: float

    @property
    def ratio(self) -> float:
        """Of the time of a rollout that is scored whole."""
        return self.chunked / self.whole

    @property
    def best(self) -> float:
        """The least ratio that a scorer as slow as the generation allows."""
        return (self.chunks + 1) / (2 * self.chunks)


def measure_overlap(checkpoint: Path, *, chunks: int, group: int, steps: int, repeats: int) -> Overlap:
    """`chunks` prompts of `group` pictures each, a prompt a chunk."""
    torch.set_num_threads(1)
    sampling = DiffusionSamplingParams(steps=steps, height=SIDE, width=SIDE, seed=0)
    rows = [PromptRow(f"a picture of thing number {row}") for row in range(chunks)]
    request = Sample((as_roots(rows, 0),)).fork(group, sampling)
    with Placement(device="cpu").slab() as slab:
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
        chunk = _median(lambda: rollout.generate(request), repeats + 1) / chunks
        scorer = WeightedScorer(Sleeping(chunk / group), time_limit=60.0)
        reward = slab.spawn(RewardService, RewardConfig({"level": scorer}))

        def step(sizes: list[int]) -> Part:
            return scored(request, rollout, reward, sizes=sizes, max_invalid=0.0, timer=PhaseTimer())

        whole, each = step([chunks]), step([1] * chunks)
        assert whole.rewards is not None
        assert each.rewards is not None
        # Text encoders round otherwise for one prompt than for several at once.
        assert torch.allclose(whole.rewards, each.rewards, atol=0.5)
        return Overlap(
            chunks,
            chunk,
            whole=_median(lambda: step([chunks]), repeats),
            chunked=_median(lambda: step([1] * chunks), repeats),
        )


def _median(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
