"""What every algorithm shares: it replays, computes a loss and calls backward. It knows no optimizer and no engine."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import final

import torch

from unirl.models.diffusion_stage import DiffusionStage
from unirl.models.policy import Weights
from unirl.types.batch import Rows, dense
from unirl.types.metric import Metrics, maximum, mean
from unirl.types.sample import Part


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an algorithm requires of the run; the trainer refuses what does not fit before any weight loads.

    ema_rollout: samples come from the EMA ("old") weights (True) or from the live ones (False)
    reference:   frozen initial weights are asked for
    trajectory:  the rollout must have stochastic steps with log-probs
    """

    ema_rollout: bool = False
    reference: bool = False
    trajectory: bool = True


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
class Context:
    """What a loss may use beside its batch.

    stage:     the stage in training
    weights:   other weights of the policy
    progress:  where the run is
    unchanged: the weights are still the ones that made the samples (the first update on an on-policy rollout)
    """

    stage: DiffusionStage
    weights: Weights
    progress: Progress
    unchanged: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Anchors(Rows):
    """pi_old of a micro-batch, frozen before the first update on a rollout.

    log_probs: `(N, S)`
    means:     `(N, S, *latent)`, for algorithms that measure a divergence from the old transition
    """

    log_probs: torch.Tensor = dense()
    means: torch.Tensor | None = dense(None)


@dataclasses.dataclass(frozen=True)
class AlgorithmOutput:
    """losses: `(N, S)`, with a graph; means, maxima: detached `(N, S)` figures by name and how they are reduced."""

    losses: torch.Tensor
    means: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class DiffusionAlgorithm(ABC):
    """An estimator of the policy gradient of a diffusion stage. A subclass is a frozen dataclass of its settings."""

    @property
    @abstractmethod
    def needs(self) -> Needs: ...

    @abstractmethod
    def columns(self, part: Part) -> int:
        """S: how many (sample, step) terms each sample contributes."""

    @abstractmethod
    def anchors(self, context: Context, part: Part, columns: slice) -> Anchors | None:
        """pi_old at these columns, asked for without gradient before the first update.

        None where the loss needs none, or where it is the policy itself: `context` tells whether `part` will be trained
        while the weights are unchanged.
        """

    @abstractmethod
    def loss(self, context: Context, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        """The loss of each (sample, step) of `part` at `columns`."""

    @final
    def frozen_anchors(self, context: Context, part: Part, replay_batch: int | None) -> list[Anchors | None]:
        """pi_old in the same forwards that `backward` will do."""
        with torch.no_grad():
            return [self.anchors(context, part, columns) for columns in self._forwards(part, replay_batch)]

    @final
    def backward(
        self, context: Context, part: Part, *, anchors: list[Anchors | None], replay_batch: int | None, terms: int
    ) -> Metrics:
        """Accumulate the gradient of the losses of `part`.

        terms: the (sample, step) terms of the whole optimizer step, which the sum of losses is divided by
        """
        outputs = []
        for columns, anchor in zip(self._forwards(part, replay_batch), anchors, strict=True):
            output = self.loss(context, part, columns, anchor)
            # Of a pair of experts the one that is not trained may have made all of these steps: no weight, no gradient.
            if output.losses.requires_grad:
                (output.losses.sum() / terms).backward()
            outputs.append(dataclasses.replace(output, losses=output.losses.detach()))
        return _reduce(outputs)

    def _forwards(self, part: Part, replay_batch: int | None) -> list[slice]:
        count = self.columns(part)
        size = replay_batch or count
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _reduce(outputs: list[AlgorithmOutput]) -> Metrics:
    """One transfer from the device for all figures of a micro-batch."""
    figures: dict[str, torch.Tensor] = {"train/loss": torch.cat([o.losses.detach().flatten() for o in outputs])}
    for name in outputs[0].means:
        figures[name] = torch.cat([o.means[name].flatten() for o in outputs])
    highest = {name: torch.cat([o.maxima[name].flatten() for o in outputs]) for name in outputs[0].maxima}
    reduced = [column.double().mean() for column in figures.values()]
    reduced += [column.double().max() for column in highest.values()]
    numbers = dict(zip([*figures, *highest], torch.stack(reduced).tolist(), strict=True))
    weight = float(len(figures["train/loss"]))
    return {name: mean(value, weight) if name in figures else maximum(value) for name, value in numbers.items()}
