"""SFTTrainer: records -> a supervised Part -> loss, step. What fine-tuning of every kind of model shares."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, Literal, Protocol, final

from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Slab
from unirl.reward.service import RewardConfig, RewardService
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.stack.base import TrainStack
from unirl.trainer.base import PolicyConfig, PolicyTrainer, spawn_backend
from unirl.trainer.evaluation import EvalConfig
from unirl.types.metric import Metrics
from unirl.types.sample import Part


class Sampler(Protocol):
    """The records of a batch, a pure function of its number."""

    def draw(self, batch: int) -> Part: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(PolicyConfig):
    """A run of supervised fine-tuning. sampling: how evaluations sample."""

    def check_records(self, batch_size: int) -> None:
        """ValueError where batches of so many records do not fit the rest of the run."""
        self.check_batch(batch_size)
        updates = self.train.geometry.num_updates_per_batch
        if updates != 1:
            raise ValueError(
                f"SFT takes one optimizer step a batch: leave train.geometry.num_updates_per_batch at 1, got {updates}"
            )

    @property
    def shown_weights(self) -> Literal["live", "ema"]:
        """Which weights evaluations show."""
        return "live" if self.train.backend.ema is None else "ema"


class SFTTrainer(PolicyTrainer):
    """Fits what is given, with the same stage, stack and checkpoints as RL. A subclass sets `encoder` in `prepare`."""

    encoder: Handle[Any]

    def __init__(self, config: SupervisedConfig) -> None:
        super().__init__(config)
        self._supervised = config

    @abstractmethod
    def load(self) -> None:
        """Read the data, before any weight loads."""

    @abstractmethod
    def prepare(self, slab: Slab) -> Sampler:
        """Spawn what is the kind's own beside the backend, `encoder` first of all; the records to draw from."""

    @final
    def setup(self, slab: Slab) -> None:
        config = self._supervised
        self.load()
        self.backend = spawn_backend(slab, config, config.model, config.train.backend, total_steps=config.run.steps)
        self.records = self.prepare(slab)
        self.stack = slab.spawn(TrainStack, self.backend, config.algorithm, config.train.geometry)

    @final
    def spawn_judged(self, slab: Slab, pipeline: Any, evaluation: EvalConfig, reward: RewardConfig) -> None:
        """Spawn what samples for evaluations, and what judges the samples."""
        self.sampler = slab.spawn(
            TrainsideEngine, self.backend, Trainside(weights=self._supervised.shown_weights), pipeline
        )
        self.judges = slab.spawn(RewardService, evaluation.judges(reward))

    @final
    def step(self, number: int) -> Metrics:
        part = self.encoder.encode(self.records.draw(number))
        return self.train(part, number)
