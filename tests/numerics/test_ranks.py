"""One run on one rank, on two and on four: the same weights, gradients and figures, however weights are spread."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driven import driven
from tests.ranks import RankPool, rank_pool
from tests.tiny_language_policy import SMALL_LM, WRITING
from tests.tiny_policy import SAMPLING, SMALL
from unirl.algorithms.base import Algorithm, Progress
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.ppo import PPO
from unirl.data.prompts import PromptRow, as_roots
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import Family
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import ARBackendConfig, DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.sharding import Sharding
from unirl.train.critic import Critic
from unirl.train.dtensor import whole
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry, Geometry, TokenGeometry
from unirl.types.metric import values
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

# Five of each: no number of ranks here divides them.
PROMPTS = {"text": ("12", "3a0", "7", "0", "55"), "picture": ("one", "two", "a three", "four", "handwritten five")}
# A larger eps than usual: where a gradient is rounding alone, AdamW would take a whole step in its direction.
OPTIMIZER = AdamW(lr=1e-2, eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Run:
    """Two rollouts of five groups of three, with two updates on each.

    family:  another than the smallest of its kind
    prompts: others than those of the kind
    """

    kind: str
    algorithm: Algorithm[Any]
    geometry: Geometry
    settings: dict[str, Any]
    family: Family | None = None
    sampling: DiffusionSamplingParams = SAMPLING
    prompts: tuple[PromptRow, ...] = ()

    @property
    def rows(self) -> list[PromptRow]:
        return [*self.prompts] or [PromptRow(prompt) for prompt in PROMPTS[self.kind]]

    def backend(self, info: RankInfo, sharding: Sharding) -> FSDPBackend:
        smallest, made = (SMALL_LM, ARBackendConfig) if self.kind == "text" else (SMALL, DiffusionBackendConfig)
        family: Any = self.family or smallest
        config: Any = made(optimizer=OPTIMIZER, max_grad_norm=0.5, sharding=sharding, **self.settings)
        return FSDPBackend.on_rank(
            info,
            family,
            config,
            device=torch.device("cpu"),
            seed=0,
            total_steps=4,
            with_reference=self.algorithm.needs.reference,
        )


RUNS = {
    "FlowGRPO, LoRA": Run(
        "picture",
        FlowGRPO(kl_coef=0.1, clip_low=1e-2, clip_high=1e-2),
        DiffusionGeometry(num_updates_per_batch=3, micro_batch_size=2, replay_batch=2),
        {"lora": LoRA(rank=2, alpha=4), "gradient_checkpointing": True},
    ),
    "FlowGRPO, all weights": Run(
        "picture", FlowGRPO(kl_coef=0.1), DiffusionGeometry(num_updates_per_batch=3, micro_batch_size=2), {}
    ),
    "NFT, LoRA, EMA": Run(
        "picture",
        DiffusionNFT(),
        DiffusionGeometry(micro_batch_size=2),
        {"lora": LoRA(rank=2, alpha=4), "ema": EMA(decay=0.5, warmup="constant", unit="rollout")},
    ),
    "GRPO, LoRA": Run(
        "text",
        GRPO(kl_coef=0.1),
        TokenGeometry(num_updates_per_batch=3, token_budget=14),
        {"lora": LoRA(rank=2, alpha=4)},
    ),
    "GRPO, all weights": Run(
        "text",
        GRPO(kl_coef=0.1),
        TokenGeometry(num_updates_per_batch=3, token_budget=14),
        {"gradient_checkpointing": True},
    ),
    "PPO, all weights": Run("text", PPO(), TokenGeometry(micro_batch_size=2), {"critic": True}),
}


def trained(
    info: RankInfo, run: Run, sharding: Sharding, folder: Path | None = None
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights after the run and the figures of each rollout, as the driver sees them. folder: for a checkpoint"""
    backend = run.backend(info, sharding)
    pipeline = ARPipeline if run.kind == "text" else DiffusionPipeline
    weights = "ema" if run.algorithm.needs.ema_rollout else "live"
    engine = TrainsideEngine.on_rank(info, backend, Trainside(weights=weights), pipeline)
    stack = TrainStack.on_rank(info, backend, run.algorithm, run.geometry)
    figures = []
    for number in range(2):
        request = Sample((as_roots(run.rows, number),)).fork(3, WRITING if run.kind == "text" else run.sampling)
        part = judged(driven(engine, "generate", request).frontier)
        if run.algorithm.needs.values is not None:
            assert isinstance(run.geometry, TokenGeometry)
            part = run.algorithm.needs.values.of(driven(Critic.on_rank(info, backend, run.geometry), "valued", part))
        batch = Batch.of(part, seed=0, ranks=info.dp)
        figures.append(values(driven(stack, "train", batch, Progress(number, 2))))
    if folder is not None:
        backend.save(folder, background=False)
        backend.finish_save()
    return {key: whole(value.detach()) for key, value in backend.state()["parameters"].items()}, figures


def judged(part: Part) -> Part:
    """Rewards that a row has by its place alone, and one row without."""
    rewards = torch.tensor([math.sin(3.0 * row) for row in range(len(part))])
    rewards[4] = torch.nan
    return part.with_rewards(Scores(rewards, {}, [()] * len(part))).compute_advantages("group", "group_std")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: trained(RankInfo(0, 1), run, Sharding()) for name, run in RUNS.items()}


def same(found: list[Any], expected: Any) -> None:
    for weights, figures in found:
        assert weights.keys() == expected[0].keys()
        for key, value in expected[0].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5)
        for own, others in zip(figures, expected[1], strict=True):
            assert own == pytest.approx(others, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_what_one_does(name: str, mode: Any, alone: dict[str, Any], ranks: RankPool) -> None:
    same(ranks(2, trained, RUNS[name], Sharding(mode=mode)), alone[name])


def test_on_a_cpu_offloading_changes_nothing(alone: dict[str, Any], ranks: RankPool) -> None:
    same(ranks(2, trained, RUNS["GRPO, all weights"], Sharding(offload=True)), alone["GRPO, all weights"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(mode="hybrid", group=2), Sharding(mode="none"), Sharding(sync="each")]
)
@pytest.mark.parametrize("name", RUNS)
def test_four_ranks_train_what_one_does(name: str, sharding: Sharding, alone: dict[str, Any], ranks: RankPool) -> None:
    if sharding.mode != "hybrid":
        return same(ranks(4, trained, RUNS[name], sharding), alone[name])
    # DTensor remembers the groups of a mesh of two dimensions for the life of a process, and a pool makes new ones.
    with rank_pool() as fresh:
        return same(fresh(4, trained, RUNS[name], sharding), alone[name])
