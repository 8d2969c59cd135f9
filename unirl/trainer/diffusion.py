"""DiffusionTrainer: rollout -> reward -> advantage -> replay, loss, step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.data.prompts import PromptSampler
from unirl.distributed.group.placement import Slab
from unirl.models.base import DiffusionFamily
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.reward.service import RewardConfig, RewardService
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import DiffusionGeometry
from unirl.trainer.base import PolicyConfig, PolicyTrainer, spawn_backend
from unirl.trainer.evaluation import EvalConfig, Evaluation, judge
from unirl.trainer.reads import check_reads
from unirl.trainer.rl import REWARD_FIGURES, AdvantageConfig, DataConfig, check_groups, reward_metrics
from unirl.trainer.run import RunConfig
from unirl.types.metric import Metrics, merge
from unirl.types.sample import Sample
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
class DiffusionConfig(PolicyConfig):
    """A diffusion RL run. Contradictions between nodes are refused here, before any weight loads."""

    model: DiffusionFamily
    data: DataConfig
    sampling: DiffusionSamplingParams
    reward: RewardConfig
    algorithm: DiffusionAlgorithm
    train: DiffusionTrainConfig
    rollout: Trainside = dataclasses.field(default_factory=Trainside)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    eval: DiffusionEvalConfig | None = None
    domain: Literal["diffusion"] = "diffusion"

    def __post_init__(self) -> None:
        check_groups(self.data, self.advantage)
        self.train.geometry.check(self.data.prompts_per_step * self.data.samples_per_prompt)
        self._check_needs()
        rows = self.data.prompts.rows()
        PromptSampler(rows, self.data.prompts_per_step, self.run.seed)
        counts = sorted({len(row.pictures) for row in rows})
        if len(counts) > 1:
            raise ValueError(f"all prompts must come with the same number of pictures, got {counts}")
        self.model.refuse([row.prompt for row in rows], self.sampling)
        self.reward.refuse_names(REWARD_FIGURES)
        check_reads(self.reward, self.model, self.sampling, rows)
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        else:
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

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.steps * self.train.geometry.num_updates_per_batch


class DiffusionTrainer(PolicyTrainer):
    """Reinforcement learning of a diffusion model."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.config = config
        self.prompts = PromptSampler(config.data.prompts.rows(), config.data.prompts_per_step, config.run.seed)

    def setup(self, slab: Slab) -> None:
        config = self.config
        self.backend = spawn_backend(
            slab,
            config,
            config.model,
            config.train.backend,
            total_steps=config.optimizer_steps,
            with_reference=config.algorithm.needs.reference,
        )
        self.rollout = slab.spawn(TrainsideEngine, self.backend, config.rollout, DiffusionPipeline)
        self.reward = slab.spawn(RewardService, config.reward)
        self.stack = slab.spawn(TrainStack, self.backend, config.algorithm, config.train.geometry)
        if config.eval is not None:
            self.judges = slab.spawn(RewardService, config.eval.judges(config.reward))

    def step(self, number: int) -> Metrics:
        config = self.config
        prompts = Sample((self.prompts.draw(number),))
        request = prompts.fork(config.data.samples_per_prompt, config.sampling)
        with self.timer("rollout"):
            sample = self.rollout.generate(request)
        with self.timer("reward"):
            scores = self.reward.score(sample)
        part = config.advantage.of(sample.frontier.with_rewards(scores), config.reward)
        metrics = self.train(part, number)
        return merge([reward_metrics(part), metrics])

    def evaluate(self) -> Evaluation | None:
        if self.config.eval is None:
            return None
        sample = self.rollout.generate(self.config.eval.request(self.config.sampling))
        return judge(sample, self.judges.score(sample), self.config.eval)
