"""What every trainer that learns from rewards shares: prompts, workers, scored rollouts, advantages, their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, Literal, final

import torch

from unirl.data.overlap import warn_of_overlap
from unirl.data.prompts import PromptRow, PromptSampler, PromptSource
from unirl.distributed.group.placement import Slab
from unirl.reward.service import RewardConfig, RewardService
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.stack.base import TrainStack
from unirl.trainer.base import PolicyConfig, PolicyTrainer, spawn_backend
from unirl.trainer.reads import check_reads
from unirl.trainer.scored import scored
from unirl.types.advantages import Scale, group_numbers, spread_of
from unirl.types.batch import piece_sizes
from unirl.types.metric import Metrics, maximum, mean, minimum, total
from unirl.types.sample import Part, Sample

# What `reward_metrics` says of the total under `reward/`, where each scorer has a figure of its name as well.
REWARD_FIGURES = ("mean", "std", "group_std", "max", "min", "invalid")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """prompts:            drawn without repeats inside an epoch
    prompts_per_step:   P prompts a rollout
    samples_per_prompt: G samples of each (the group)
    prompts_per_chunk:  so many prompts are generated at a time, and scored while the next ones are; None scores a
                        rollout when all of it is there. Worth it where scorers run elsewhere: a server, processes
    """

    prompts: PromptSource
    prompts_per_step: int
    samples_per_prompt: int
    prompts_per_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")
        chunk, most = self.prompts_per_chunk, self.prompts_per_step
        if chunk is not None and not 1 <= chunk <= most:
            raise ValueError(f"prompts_per_chunk must be 1 to prompts_per_step={most}, or null, got {chunk}")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(PolicyConfig):
    """A run that learns from rewards."""

    data: DataConfig
    reward: RewardConfig
    rollout: Trainside = dataclasses.field(default_factory=Trainside)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)

    @property
    def digests(self) -> dict[str, str]:
        return {"data.prompts": self.data.prompts.digest, **super().digests}

    def check_rollout(self, figures: Iterable[str]) -> tuple[PromptRow, ...]:
        """The prompts; ValueError where they, the reward and the batch do not fit. figures: names that are taken."""
        data, rows = self.data, self.data.prompts.rows()
        self.check_batch(data.prompts_per_step * data.samples_per_prompt)
        PromptSampler(rows, data.prompts_per_step, self.run.seed)
        self.reward.refuse_names(figures)
        self.reward.refuse_unscored(rows)
        self.reward.refuse_idle(rows)
        self.reward.refuse_rows(rows, data.prompts.origin)
        check_reads(self.reward, self.model, self.sampling, rows)
        if self.eval is None:
            self.run.refuse_best_without_evaluation()
        return rows

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.run.steps * self.train.geometry.num_updates_per_batch


class RLTrainer(PolicyTrainer):
    """A run that learns from rewards. A subclass spawns the sampler and then the learner in its setup."""

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config)
        self._rl = config
        self.prompts = PromptSampler(config.data.prompts.rows(), config.data.prompts_per_step, config.run.seed)
        if config.eval is not None:
            evaluated = {row.key: row.prompt for row in config.eval.prompts.rows()}
            warn_of_overlap("eval.prompts", evaluated, [row.key for row in self.prompts.source])

    @final
    def spawn_sampler(self, slab: Slab, pipeline: Any) -> None:
        """The policy, and what samples from it."""
        config = self._rl
        self.backend = spawn_backend(
            slab,
            config,
            config.model,
            config.train.backend,
            total_steps=config.optimizer_steps,
            with_reference=config.algorithm.needs.reference,
        )
        self.rollout = slab.spawn(TrainsideEngine, self.backend, config.rollout, pipeline)

    @final
    def spawn_learner(self, slab: Slab) -> None:
        """What scores samples and trains on them, and what judges those of evaluations."""
        config = self._rl
        self.reward = slab.spawn(RewardService, config.reward)
        self.stack = slab.spawn(TrainStack, self.backend, config.algorithm, config.train.geometry)
        if config.eval is not None:
            self.judges = slab.spawn(RewardService, config.eval.judges(config.reward))

    @final
    def scored(self, prompts: Part) -> Part:
        """Samples of these prompts with their rewards."""
        config, data = self._rl, self._rl.data
        return scored(
            Sample((prompts,)).fork(data.samples_per_prompt, config.sampling),
            self.rollout,
            self.reward,
            sizes=piece_sizes(len(prompts), data.prompts_per_chunk),
            max_invalid=config.reward.max_invalid,
            timer=self.timer,
        )

    @final
    def reward_metrics(self, part: Part) -> Metrics:
        """Figures of a scored part."""
        return reward_metrics(part, self._rl.reward.absent(part.metadata))


def check_groups(data: DataConfig, advantage: AdvantageConfig) -> None:
    """ValueError where no sample has another one to be compared with."""
    prompts, group = data.prompts_per_step, data.samples_per_prompt
    if (prompts * group if advantage.scope == "global" else group) < 2:
        raise ValueError(
            f"data.samples_per_prompt={group}: a group of one has no baseline, so every advantage is 0; "
            "use at least 2, or advantage.scope=global with several prompts"
        )


def reward_metrics(part: Part, absent: Collection[str] = ()) -> Metrics:
    """Figures of a scored part; of its advantages where they are relative to the group.

    absent: scorers that apply to none of its rows and have no figure; one that applies to some has that of these
    """
    assert part.rewards is not None
    assert part.reward_components is not None
    finite = part.rewards[part.valid].double()
    numbers = group_numbers(part.groups("group"))
    spread = spread_of(part.rewards, numbers)
    metrics: Metrics = {"reward/invalid": total(float(len(part) - len(finite)))}
    if part.advantages is not None:
        trained = torch.zeros_like(spread.count).index_add(0, numbers, (part.advantages != 0).double())
        metrics["advantage/constant_groups"] = mean(float((trained == 0).double().mean()), float(len(trained)))
    if len(finite):
        weight = float(len(finite))
        metrics["reward/mean"] = mean(float(finite.mean()), weight)
        metrics["reward/std"] = mean(float(finite.std(correction=0)), weight)
        spreads = spread.std[spread.count > 0]
        metrics["reward/group_std"] = mean(float(spreads.mean()), float(len(spreads)))
        metrics["reward/max"], metrics["reward/min"] = maximum(float(finite.max())), minimum(float(finite.min()))
    for name, column in part.reward_components.items():
        if name in absent:
            continue
        known = column[torch.isfinite(column)].double()
        metrics[f"reward/{name}"] = mean(float(known.mean()) if len(known) else float("nan"), float(len(known)))
    return metrics
