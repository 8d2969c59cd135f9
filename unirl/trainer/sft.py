"""SFTTrainer: records -> a supervised Part -> loss, step."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.algorithms.base import Progress
from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.records import RecordSampler, RecordSource
from unirl.distributed.group.placement import Slab
from unirl.models.base import DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.reward.service import RewardConfig, RewardService
from unirl.rollout.supervised import SupervisedEncoder
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.base import TrainStack
from unirl.trainer.base import PolicyConfig, PolicyTrainer
from unirl.trainer.diffusion import DiffusionEvalConfig, DiffusionTrainConfig
from unirl.trainer.evaluation import Evaluation, judge
from unirl.types.metric import Metrics
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class SFTDataConfig:
    """records; batch_size: records a step; caption_dropout: share of captions replaced by the empty prompt."""

    records: RecordSource
    batch_size: int
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        there = self.records.count()
        if not 1 <= self.batch_size <= there:
            raise ValueError(f"batch_size={self.batch_size} does not fit the {there} records: take 1 to {there}")
        if not 0 <= self.caption_dropout < 1:
            raise ValueError(f"caption_dropout must be in [0, 1), got {self.caption_dropout}")


@dataclasses.dataclass(frozen=True)
class SFTEvalConfig(DiffusionEvalConfig):
    """Evaluation by sampling. reward: the scorers whose weighted sum is `eval/reward`."""

    reward: RewardConfig = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(PolicyConfig):
    """Supervised fine-tuning of a flow model. sampling: the size of what it trains on, and how evaluations sample."""

    model: DiffusionFamily
    data: SFTDataConfig
    algorithm: FlowSFT
    train: DiffusionTrainConfig
    sampling: DiffusionSamplingParams
    eval: SFTEvalConfig | None = None
    domain: Literal["sft"] = "sft"

    def __post_init__(self) -> None:
        self.train.geometry.check(self.data.batch_size)
        if self.train.geometry.num_updates_per_batch != 1:
            updates = self.train.geometry.num_updates_per_batch
            raise ValueError(
                f"SFT takes one optimizer step a batch: leave train.geometry.num_updates_per_batch at 1, got {updates}"
            )
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        else:
            self.eval.fit(self.model, self.sampling, self.eval.reward, self.run)


class SFTTrainer(PolicyTrainer):
    """Regression on given pictures, with the same stage, stack and checkpoints as RL."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.config = config

    def setup(self, slab: Slab) -> None:
        config, data = self.config, self.config.data
        records = data.records.load()
        config.model.refuse(records.captions, config.sampling)
        self.records = RecordSampler(records, data.batch_size, config.run.seed, data.caption_dropout)
        self.backend = slab.spawn(
            FSDPBackend,
            config.model,
            config.train.backend,
            device=torch.device(config.placement.device_type()),
            seed=config.run.seed,
            total_steps=config.run.steps,
            with_reference=False,
        )
        self.encoder = slab.spawn(SupervisedEncoder, self.backend, config.sampling)
        self.stack = slab.spawn(TrainStack, self.backend, config.algorithm, config.train.geometry, seed=config.run.seed)
        if config.eval is not None:
            weights = "live" if config.train.backend.ema is None else "ema"
            self.sampler = slab.spawn(TrainsideEngine, self.backend, Trainside(weights=weights), DiffusionPipeline)
            self.judges = slab.spawn(RewardService, config.eval.judges(config.eval.reward))

    def step(self, number: int) -> Metrics:
        part = self.encoder.encode(self.records.draw(number))
        return self.stack.train(part, Progress(number, self.config.run.steps))

    def evaluate(self) -> Evaluation | None:
        if self.config.eval is None:
            return None
        sample = self.sampler.generate(self.config.eval.request(self.config.sampling))
        return judge(sample, self.judges.score(sample), self.config.eval)
