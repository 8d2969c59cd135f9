"""What every algorithm shares: it replays, computes a loss and calls backward. It knows no optimizer and no engine."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch

from unirl.models.policy import Weights
from unirl.types.metric import Metrics, maximum, mean
from unirl.types.sample import Part

Stage = TypeVar("Stage")


@dataclasses.dataclass(frozen=True)
class GAE:
    """Advantages of tokens from the values of a critic (arXiv 1506.02438): see `Part.compute_gae`.

    gamma:  discount of a later token
    lam:    0 trusts the critic for what follows a token, 1 the reward alone
    whiten: advantages of a rollout get mean 0 and standard deviation 1
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= self.__dict__[name] <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {self.__dict__[name]}")

    def of(self, part: Part) -> Part:
        """`part` with its advantages and the returns."""
        return part.compute_gae(gamma=self.gamma, lam=self.lam, whiten=self.whiten)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an algorithm requires of the run; the trainer refuses what does not fit before any weight loads.

    ema_rollout: samples come from the EMA ("old") weights (True) or from the live ones (False)
    reference:   frozen initial weights are asked for
    trajectory:  a diffusion rollout must have stochastic steps with log-probs
    values:      a critic, and what advantages are made of its values
    """

    ema_rollout: bool = False
    reference: bool = False
    trajectory: bool = True
    values: GAE | None = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the run is: `step` of `total`, counted from 0."""

    step: int
    total: int

    @property
    def fraction(self) -> float:
        """0 at the first step, towards 1 at the end."""
        return self.step / max(self.total, 1)


@dataclasses.dataclass(frozen=True)
class Context(Generic[Stage]):
    """What a loss may use beside its batch.

    stage:        the stage in training
    weights:      other weights of the policy
    progress:     where the run is
    unchanged:    the weights are still the ones that made the samples (the first update on an on-policy rollout)
    replay_batch: denoising steps in one forward; None takes all of them
    """

    stage: Stage
    weights: Weights
    progress: Progress
    unchanged: bool
    replay_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class AlgorithmOutput:
    """A loss for each term, and what there is to say about it.

    losses:        of the terms, with a graph: one for each (sample, step), or for each token
    means, maxima: detached figures by name and how they are reduced; one for each term
    """

    losses: torch.Tensor
    means: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def beside_rollout(
    output: AlgorithmOutput, context: Context[Any], log_probs: torch.Tensor, recorded: torch.Tensor
) -> AlgorithmOutput:
    """`output`, and at unchanged weights how far `log_probs` are from those that the rollout recorded, for each term.

    The ratio does not tell: to a pi_old that was replayed it is 1 even where rollout and replay disagree.
    """
    if not context.unchanged:
        return output
    gap = (log_probs.detach() - recorded).abs()
    means = {**output.means, "train/rollout_gap": gap}
    return dataclasses.replace(output, means=means, maxima={**output.maxima, "train/rollout_gap_max": gap})


class Algorithm(ABC, Generic[Stage]):
    """An estimator of a stage's gradient. A subclass is a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @abstractmethod
    def terms(self, part: Part) -> float:
        """What `part` adds to the denominator of its optimizer step, by which the sum of losses is divided."""

    def idle(self, part: Part) -> Part:
        """A row of `part`, whatever it is, for which every forward is done: a rank in step with others trains on it.

        Trained with infinite `terms`, it adds a gradient of exactly 0.
        """
        return part.select([0])

    @abstractmethod
    def frozen_anchors(self, context: Context[Stage], part: Part) -> Any:
        """pi_old of `part`, in the same forwards that `backward` will do, before the first update on the rollout."""

    @abstractmethod
    def backward(self, context: Context[Stage], part: Part, anchors: Any, *, terms: float) -> Metrics:
        """Accumulate the gradient of the losses of `part`. terms: of the whole optimizer step."""


def reduced(outputs: list[AlgorithmOutput], loss: torch.Tensor, weight: float) -> Metrics:
    """One transfer from the device for all figures of a micro-batch. loss: its mean, of `weight` terms."""
    figures = {name: torch.cat([output.means[name].flatten() for output in outputs]) for name in outputs[0].means}
    highest = {name: torch.cat([output.maxima[name].flatten() for output in outputs]) for name in outputs[0].maxima}
    columns = [loss.double(), *(column.double().mean() for column in figures.values())]
    columns += [column.double().max() for column in highest.values()]
    first, *numbers = torch.stack(columns).tolist()
    report = {"train/loss": mean(first, weight)}
    for name, value in zip([*figures, *highest], numbers, strict=True):
        report[name] = mean(value, float(len(figures[name]))) if name in figures else maximum(value)
    return report
