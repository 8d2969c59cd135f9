"""Ten steps of each algorithm on a tiny model, as they were when their numbers were checked in (curves/*.txt).

A refactoring keeps every number. A change that is meant to move a curve regenerates it, and says why:

    python -m tests.numerics.test_training_curves

Reinforcement makes pictures brighter: its numbers are the mean pixel of each rollout. Supervised numbers are losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_policy import SAMPLING, SMALL, brightness, rewarded
from unirl.algorithms.base import Progress
from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.prompts import PromptRow, PromptSampler
from unirl.data.records import Records, RecordSampler
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Placement, Slab
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.rollout.supervised import SupervisedEncoder
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, Geometry
from unirl.types.metric import values
from unirl.types.sample import Sample
from unirl.types.steps import NoSteps, WindowSteps

FOLDER = Path(__file__).parent / "curves"
STEPS = 10
PROMPTS = tuple(PromptRow(f"a handwritten {digit}") for digit in ("one", "two", "three", "four"))
# eps well above the rounding of a gradient: a weight whose gradient is noise must not move by the sign of it.
OPTIMIZER = AdamW(lr=3e-3, eps=1e-5, warmup_steps=2, schedule="cosine", final_ratio=0.1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What differs between the reinforced curves."""

    algorithm: DiffusionAlgorithm
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    ema: EMA | None = None
    updates: int = 2


RECIPES = {
    "flow_grpo": Recipe(FlowGRPO(clip_low=1e-3, clip_high=1e-3, kl_coef=0.04)),
    "mix_grpo": Recipe(FlowGRPO(clip_low=1e-3, clip_high=1e-3, kl_coef=0.0), {"sde": WindowSteps(size=2)}),
    "dance_grpo": Recipe(
        FlowGRPO(clip_low=1e-3, clip_high=1e-3, kl_coef=0.0, anchor="replay"),
        {"strategy": "dance", "noise_level": 0.3, "same_initial_noise": True},
    ),
    "flow_dppo": Recipe(FlowDPPO(kl_threshold=1e-3)),
    "diffusion_nft": Recipe(
        DiffusionNFT(kl_coef=0.1),
        {"sde": NoSteps(), "noise_level": 0.0, "solver": "dpmpp_2m"},
        EMA(0.5, warmup="linear", warmup_steps=0, slope=0.1, unit="rollout"),
        updates=1,
    ),
}


def spawned(slab: Slab, *, ema: EMA | None, updates: int, reference: bool) -> Handle[FSDPBackend]:
    return slab.spawn(
        FSDPBackend,
        SMALL,
        DiffusionBackendConfig(optimizer=OPTIMIZER, ema=ema),
        device=torch.device("cpu"),
        seed=0,
        total_steps=STEPS * updates,
        with_reference=reference,
    )


def reinforced(recipe: Recipe) -> list[float]:
    """The mean reward of each rollout: four prompts, four pictures of each."""
    needs = recipe.algorithm.needs
    sampling = dataclasses.replace(SAMPLING, steps=5, seed=1, **recipe.sampling)
    prompts, geometry = PromptSampler(PROMPTS, 4, seed=1), Geometry(recipe.updates, micro_batch_size=4)
    rewards = []
    with Placement(device="cpu").slab() as slab:
        backend = spawned(slab, ema=recipe.ema, updates=recipe.updates, reference=needs.reference)
        engine = slab.spawn(
            TrainsideEngine, backend, Trainside(weights="ema" if needs.ema_rollout else "live"), DiffusionPipeline
        )
        stack = slab.spawn(TrainStack, backend, recipe.algorithm, geometry)
        for step in range(STEPS):
            sample = engine.generate(Sample((prompts.draw(step),)).fork(4, sampling))
            part = rewarded(sample.frontier, scale="group_std")
            stack.train(Batch.of(part, 1, ranks=1), Progress(step, STEPS))
            rewards.append(float(brightness(part).double().mean()))
    return rewards


def supervised() -> list[float]:
    """The loss of each batch of 16 of 64 records."""
    draws = torch.Generator().manual_seed(0)
    pictures = torch.rand(4, 1, 8, 8, generator=draws).repeat(16, 3, 1, 1)
    records = RecordSampler(Records(pictures, [row.prompt for row in PROMPTS] * 16), 16, seed=1, caption_dropout=0.1)
    losses = []
    with Placement(device="cpu").slab() as slab:
        backend = spawned(slab, ema=None, updates=1, reference=False)
        encoder = slab.spawn(SupervisedEncoder, backend, SAMPLING)
        stack = slab.spawn(TrainStack, backend, FlowSFT(seed=1), Geometry(micro_batch_size=8))
        for step in range(STEPS):
            report = stack.train(Batch.of(encoder.encode(records.draw(step)), 1, ranks=1), Progress(step, STEPS))
            losses.append(values(report)["train/loss"])
    return losses


CURVES: dict[str, Callable[[], list[float]]] = {
    **{name: lambda recipe=recipe: reinforced(recipe) for name, recipe in RECIPES.items()},
    "flow_sft": supervised,
}


@pytest.mark.parametrize("name", CURVES)
def test_the_curve_is_the_one_checked_in(name: str) -> None:
    expected = [float(line) for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split()]
    assert len(expected) == STEPS
    assert CURVES[name]() == pytest.approx(expected, rel=1e-4)


def test_every_file_is_a_curve() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CURVES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, curve in CURVES.items():
        (FOLDER / f"{name}.txt").write_text("".join(f"{number:.8f}\n" for number in curve()), encoding="utf-8")
