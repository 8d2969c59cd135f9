"""FlowSFTTrainer: supervised fine-tuning of a flow model on pictures, or on latents, with captions."""

from __future__ import annotations

import dataclasses
from typing import Literal

from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.records import RecordSampler, RecordSource
from unirl.distributed.group.placement import Slab
from unirl.models.base import DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.reward.service import RewardConfig
from unirl.rollout.supervised import SupervisedEncoder
from unirl.trainer.diffusion import DiffusionEvalConfig, DiffusionTrainConfig
from unirl.trainer.evaluation import Evaluation, judge
from unirl.trainer.sft import SFTTrainer, SupervisedConfig
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
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning of a flow model. sampling: the size of what it trains on, and how evaluations sample."""

    model: DiffusionFamily
    data: SFTDataConfig
    algorithm: FlowSFT
    train: DiffusionTrainConfig
    sampling: DiffusionSamplingParams
    eval: SFTEvalConfig | None = None
    domain: Literal["sft"] = "sft"

    def __post_init__(self) -> None:
        self.check_records(self.data.batch_size)
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        else:
            self.eval.fit(self.model, self.sampling, self.eval.reward, self.run)


class FlowSFTTrainer(SFTTrainer):
    """Regression on given pictures."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.config = config

    def load(self) -> None:
        config, data = self.config, self.config.data
        records = data.records.load()
        config.model.refuse(records.captions, config.sampling)
        self.loaded = RecordSampler(records, data.batch_size, config.run.seed, data.caption_dropout)

    def prepare(self, slab: Slab) -> RecordSampler:
        config = self.config
        self.encoder = slab.spawn(SupervisedEncoder, self.backend, config.sampling)
        if self.loaded.records.latents is not None:
            self.encoder.encode(self.loaded.draw(0))  # latents of another shape are refused before the first step
        if config.eval is not None:
            self.spawn_judged(slab, DiffusionPipeline, config.eval, config.eval.reward)
        return self.loaded

    def evaluate(self) -> Evaluation | None:
        config = self.config.eval
        if config is None:
            return None
        sample = self.sampler.generate(config.request(self.config.sampling))
        return judge(sample, self.judges.score(sample), config)
