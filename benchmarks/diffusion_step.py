"""One Flow-GRPO step of a tiny SD3 with LoRA, through the product and by a bare loop with the same mathematics.

2.3 million parameters, latents of 4 x 16 x 16, 16 samples x 10 steps, LoRA of rank 32, one thread. Times are the
process's own CPU seconds and only mean something as ratios within one run.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from benchmarks.bare_loop import Workload, bare_step
from benchmarks.model_time import model_seconds
from unirl.algorithms.base import Progress
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.data.prompts import PromptRow, as_roots
from unirl.distributed.group.placement import Placement, Slab
from unirl.models.diffusion.sd3 import SD3
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry
from unirl.types.media import Media
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.steps import ListedSteps

SIDE = (
    32  # pixels: the tiny autoencoder halves them, so the latents are those of 128 pixels under the usual factor of 8
)
TEXT = 32  # T5 tokens; CLIP adds 77


@dataclasses.dataclass(frozen=True)
class Brightness(Scorer):
    """Mean level of a picture: costs nothing, so the benchmark times the rest."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float(sample.picture.mean()) / 255 for sample in samples]


@dataclasses.dataclass
class Cost:
    """CPU seconds of a step, those inside the model's forward and backward, and the highest resident memory in MiB."""

    total: float
    model: float
    peak_mib: float

    @property
    def overhead(self) -> float:
        """Share of the step outside the model's forward and backward."""
        return 1 - self.model / self.total


class Product:
    """The workload on the real backend, engine, reward service and stack."""

    def __init__(self, slab: Slab, checkpoint: Path, work: Workload) -> None:
        self._work = work
        backend = DiffusionBackendConfig(
            optimizer=AdamW(lr=1e-4),
            lora=LoRA(rank=32, alpha=64),
            guidance_gradient=work.guidance_gradient,
            compute_dtype="float32",
        )
        self.backend = slab.spawn(
            FSDPBackend,
            SD3(checkpoint=str(checkpoint), max_sequence_length=TEXT),
            backend,
            device=torch.device("cpu"),
            seed=0,
            total_steps=1000,
            with_reference=False,
        )
        algorithm = FlowGRPO(clip_low=work.clip, clip_high=work.clip, kl_coef=0.0)
        self._rollout = slab.spawn(TrainsideEngine, self.backend, Trainside(), DiffusionPipeline)
        self._reward = slab.spawn(RewardService, RewardConfig({"brightness": WeightedScorer(Brightness())}))
        self._stack = slab.spawn(TrainStack, self.backend, algorithm, DiffusionGeometry(replay_batch=1))
        self._sampling = DiffusionSamplingParams(
            steps=work.steps,
            height=SIDE,
            width=SIDE,
            guidance=work.guidance,
            noise_level=work.level,
            sde=ListedSteps(tuple(range(work.trained))),
        )
        self._rollouts = 0

    def step(self) -> None:
        """Prompts -> rollout -> reward -> advantage -> one update."""
        rows = [PromptRow(f"a picture of thing number {row}") for row in range(self._work.prompts)]
        request = Sample((as_roots(rows, self._rollouts),)).fork(self._work.group, self._sampling)
        sample = self._rollout.generate(request)
        part = sample.frontier.with_rewards(self._reward.score(sample)).compute_advantages(eps=1e-4)
        self._stack.train(Batch.of(part, 0, ranks=1), Progress(self._rollouts, 1000))
        self._rollouts += 1


class Bare:
    """The same model and workload in a hand-written loop."""

    def __init__(self, checkpoint: Path, work: Workload) -> None:
        from unirl.train.lora import inject

        self._work = work
        family = SD3(checkpoint=str(checkpoint), max_sequence_length=TEXT)
        bundle = family.load(torch.device("cpu"), torch.float32)
        inject(bundle.transformer, LoRA(rank=32, alpha=64), family.lora_targets, 0)
        self.transformer = bundle.transformer
        trainable = [parameter for parameter in bundle.transformer.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0, fused=True)
        sampling = DiffusionSamplingParams(steps=work.steps, height=SIDE, width=SIDE)
        self._sigmas = family.schedule(bundle, sampling).sigmas
        self._shape = family.latent_shape(bundle, sampling)
        with torch.no_grad():
            rows = [f"a picture of thing number {row // work.group}" for row in range(work.samples)]
            text, empty = (
                family.encode(bundle, Media(texts=rows), sampling),
                family.encode(bundle, Media(texts=[""] * work.samples), sampling),
            )
            assert text.pooled is not None
            assert empty.pooled is not None
            self._embeddings = (text.tokens, text.pooled, empty.tokens, empty.pooled)
            self._decode = lambda latents: family.decode(bundle, latents, sampling)

    def step(self) -> None:
        """The whole step, the decoding of pictures included."""
        latents = bare_step(self.transformer, self._optimizer, self._embeddings, self._sigmas, self._shape, self._work)
        with torch.no_grad():
            self._decode(latents)


def cost(step: Callable[[], None], transformer: torch.nn.Module, repeats: int) -> Cost:
    """The cheapest of `repeats` steps after a warm-up."""
    step()
    costs = []
    for _ in range(repeats):
        gc.collect()
        with model_seconds(transformer) as spent:
            start = time.process_time()
            step()
            total = time.process_time() - start
        costs.append(Cost(total, spent[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    return min(costs, key=lambda c: c.total)


def measure(side: Literal["product", "bare"], checkpoint: Path, work: Workload, repeats: int) -> Cost:
    """What one side takes for a step, in this process."""
    import diffusers
    import transformers

    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    if side == "bare":
        bare = Bare(checkpoint, work)
        return cost(bare.step, bare.transformer, repeats)
    with Placement(device="cpu").slab() as slab:
        product = Product(slab, checkpoint, work)
        return cost(product.step, _transformer_of(product), repeats)


def _transformer_of(product: Product) -> torch.nn.Module:
    # In-process launcher: the benchmark looks behind the handle, which the product never does.
    host = product.backend.launcher._host  # type: ignore[attr-defined]  # noqa: SLF001 - the yardstick looks inside
    return host._instances[product.backend.key].stage.bundle.transformer  # noqa: SLF001 - the yardstick looks inside
