"""DiffusionTrainer: rollout -> reward -> advantage -> replay, loss, step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.distributed.group.placement import Slab
from unirl.models.base import DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.reward.service import RewardConfig
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.stack.planner import DiffusionGeometry
from unirl.trainer.evaluation import EvalConfig, Evaluation, judge
from unirl.trainer.rl import REWARD_FIGURES, RLConfig, RLTrainer, check_groups
from unirl.trainer.run import RunConfig
from unirl.types.metric import Metrics, merge
from unirl.types.sampling import DiffusionSamplingParams, SamplingParams


@dataclasses.dataclass(frozen=True)
class DiffusionTrainConfig:
    """backend: weights and optimizer; geometry: how a rollout is cut into updates and micro-batches."""

    backend: DiffusionBackendConfig
    geometry: DiffusionGeometry = dataclasses.field(default_factory=DiffusionGeometry)


@dataclasses.dataclass(frozen=True)
class DiffusionEvalConfig(EvalConfig):
    """Samples are made by the ODE."""

    def fit(
        self, model: DiffusionFamily, sampling: DiffusionSamplingParams, reward: RewardConfig, run: RunConfig
    ) -> None:
        """ValueError where this evaluation does not fit the rest of the run."""
        self.check(model, sampling, reward, run)
        model.refuse([row.prompt for row in self.prompts.rows()], sampling)

    def sampled(self, sampling: SamplingParams) -> SamplingParams:
        assert isinstance(sampling, DiffusionSamplingParams)
        return sampling.deterministic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionConfig(RLConfig):
    """A diffusion RL run. Contradictions between nodes are refused here, before any weight loads."""

    model: DiffusionFamily
    sampling: DiffusionSamplingParams
    algorithm: DiffusionAlgorithm
    train: DiffusionTrainConfig
    eval: DiffusionEvalConfig | None = None
    domain: Literal["diffusion"] = "diffusion"

    def __post_init__(self) -> None:
        check_groups(self.data, self.advantage)
        self._check_needs()
        rows = self.check_rollout(REWARD_FIGURES)
        counts = sorted({len(row.pictures) for row in rows})
        if len(counts) > 1:
            raise ValueError(f"all prompts must come with the same number of pictures, got {counts}")
        self.model.refuse([row.prompt for row in rows], self.sampling)
        if self.eval is not None:
            self.eval.fit(self.model, self.sampling, self.reward, self.run)

    def _check_needs(self) -> None:
        needs, name = self.algorithm.needs, type(self.algorithm).__name__
        wanted = "ema" if needs.ema_rollout else "live"
        if self.rollout.weights != wanted:
            given = self.rollout.weights
            raise ValueError(f"{name} samples with the {wanted} weights: set rollout.weights={wanted}, got {given}")
        if needs.ema_rollout and self.train.backend.ema is None:
            raise ValueError(f"{name} samples with EMA weights: set train.backend.ema")
        ema, updates = self.train.backend.ema, self.train.geometry.num_updates_per_batch
        if needs.ema_rollout and ema is not None and ema.unit == "optimizer_step" and updates > 1:
            raise ValueError(
                f"{name} trains against the EMA weights, which must not move in the {updates} updates on a rollout: "
                "set train.backend.ema.unit=rollout, or train.geometry.num_updates_per_batch=1"
            )
        if needs.trajectory and not self.sampling.resolve_sde_indices(0):
            raise ValueError(
                f"{name} trains on stochastic steps, but sampling picks none (noise_level={self.sampling.noise_level}, "
                f"sde={self.sampling.sde})"
            )
        if self.sampling.same_initial_noise and not self.sampling.resolve_sde_indices(0):
            raise ValueError(
                "sampling.same_initial_noise=true without a stochastic step makes all samples of a group one picture, "
                "so every advantage is 0: set it to false, or sampling.noise_level above 0"
            )


class DiffusionTrainer(RLTrainer):
    """Reinforcement learning of a diffusion model."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.config = config

    def setup(self, slab: Slab) -> None:
        self.spawn_sampler(slab, DiffusionPipeline)
        self.spawn_learner(slab)

    def step(self, number: int) -> Metrics:
        config = self.config
        part = config.advantage.of(self.scored(self.prompts.draw(number)), config.reward)
        return merge([self.reward_metrics(part), self.train(part, number)])

    def evaluate(self) -> Evaluation | None:
        if self.config.eval is None:
            return None
        sample = self.rollout.generate(self.config.eval.request(self.config.sampling))
        return judge(sample, self.judges.score(sample), self.config.eval)
