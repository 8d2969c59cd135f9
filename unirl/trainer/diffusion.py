"""DiffusionTrainer: rollout -> reward -> advantage -> replay, loss, step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from unirl.algorithms.base import DiffusionAlgorithm, Progress
from unirl.data.prompts import PromptSampler, PromptSource
from unirl.distributed.group.placement import Slab
from unirl.models.base import DiffusionFamily
from unirl.reward.service import RewardConfig, RewardService
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.fsdp import BackendConfig, FSDPBackend
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Geometry
from unirl.trainer.base import CommonConfig, Trainer
from unirl.trainer.evaluation import EvalConfig, Evaluation, judge
from unirl.types.advantages import Scale
from unirl.types.metric import Metrics, maximum, mean, merge, minimum, total
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

# What `reward_metrics` says of the total under `reward/`, where each scorer has a figure of its name as well.
_REWARD_FIGURES = ("mean", "std", "group_std", "max", "min", "invalid")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """prompts; prompts_per_step: P prompts a rollout; samples_per_prompt: G images of each (the group)."""

    prompts: PromptSource
    prompts_per_step: int
    samples_per_prompt: int

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages: see `Part.compute_advantages`."""

    scope: Literal["group", "prompt", "global"] = "group"
    scale: Scale = "group_std"
    combine: Literal["weighted_sum", "per_component"] = "weighted_sum"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError(f"eps must not be negative, got {self.eps}")

    def of(self, part: Part, reward: RewardConfig) -> Part:
        """`part` with its advantages."""
        weights = reward.weights if self.combine == "per_component" else None
        return part.compute_advantages(self.scope, self.scale, combine=self.combine, weights=weights, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """backend: weights and optimizer; geometry: how a rollout is cut into updates and micro-batches."""

    backend: BackendConfig
    geometry: Geometry = dataclasses.field(default_factory=Geometry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionConfig(CommonConfig):
    """A diffusion RL run. Contradictions between nodes are refused here, before any weight loads."""

    model: DiffusionFamily
    data: DataConfig
    sampling: DiffusionSamplingParams
    reward: RewardConfig
    algorithm: DiffusionAlgorithm
    train: TrainConfig
    rollout: Trainside = dataclasses.field(default_factory=Trainside)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    eval: EvalConfig | None = None
    domain: Literal["diffusion"] = "diffusion"

    def __post_init__(self) -> None:
        self._check_geometry()
        self._check_needs()
        rows = self.data.prompts.rows()
        PromptSampler(rows, self.data.prompts_per_step, self.run.seed)
        self.model.refuse([row.prompt for row in rows], self.sampling)
        self.reward.refuse_names(_REWARD_FIGURES)
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        else:
            self.eval.check(self.model, self.sampling, self.reward, self.run)

    def _check_geometry(self) -> None:
        prompts, group = self.data.prompts_per_step, self.data.samples_per_prompt
        if (prompts * group if self.advantage.scope == "global" else group) < 2:
            raise ValueError(
                f"data.samples_per_prompt={group}: a group of one has no baseline, so every advantage is 0; "
                "use at least 2, or advantage.scope=global with several prompts"
            )
        self.train.geometry.check(prompts * group)

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


class DiffusionTrainer(Trainer):
    """Reinforcement learning of a diffusion model."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.config = config
        self.prompts = PromptSampler(config.data.prompts.rows(), config.data.prompts_per_step, config.run.seed)

    def setup(self, slab: Slab) -> None:
        config = self.config
        self.backend = slab.spawn(
            FSDPBackend,
            config.model,
            config.train.backend,
            device=torch.device(config.placement.device_type()),
            seed=config.run.seed,
            total_steps=config.optimizer_steps,
            with_reference=config.algorithm.needs.reference,
        )
        self.rollout = slab.spawn(TrainsideEngine, self.backend, config.rollout)
        self.reward = slab.spawn(RewardService, config.reward)
        self.stack = slab.spawn(TrainStack, self.backend, config.algorithm, config.train.geometry, seed=config.run.seed)
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
        metrics = self.stack.train(part, Progress(number, config.run.steps))
        return merge([reward_metrics(part), metrics])

    def evaluation_due(self, done: int) -> bool:
        return self.config.eval is not None and self.config.eval.due(done, self.config.run.steps)

    def evaluate(self) -> Evaluation | None:
        if self.config.eval is None:
            return None
        sample = self.rollout.generate(self.config.eval.request(self.config.sampling))
        return judge(sample, self.judges, self.config.eval)

    def state(self) -> dict[str, Any]:
        return {"backend": self.backend.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.backend.load_state(state["backend"])


def reward_metrics(part: Part) -> Metrics:
    """Figures of a scored part with advantages."""
    assert part.rewards is not None
    assert part.advantages is not None
    assert part.reward_components is not None
    finite = part.rewards[part.valid].double()
    groups = part.groups("group")
    rows = {group: [i for i, own in enumerate(groups) if own == group] for group in dict.fromkeys(groups)}
    by_group = [part.rewards[members][part.valid[members]].double() for members in rows.values()]
    spreads = [float(group.std(correction=0)) for group in by_group if len(group)]
    constant = [float(not part.advantages[members].any()) for members in rows.values()]
    metrics: Metrics = {
        "reward/invalid": total(float(len(part) - len(finite))),
        "advantage/constant_groups": mean(sum(constant) / len(constant), float(len(constant))),
    }
    if len(finite):
        weight = float(len(finite))
        metrics["reward/mean"] = mean(float(finite.mean()), weight)
        metrics["reward/std"] = mean(float(finite.std(correction=0)), weight)
        metrics["reward/group_std"] = mean(sum(spreads) / len(spreads), float(len(spreads)))
        metrics["reward/max"], metrics["reward/min"] = maximum(float(finite.max())), minimum(float(finite.min()))
    for name, column in part.reward_components.items():
        known = column[torch.isfinite(column)].double()
        metrics[f"reward/{name}"] = mean(float(known.mean()) if len(known) else float("nan"), float(len(known)))
    return metrics
