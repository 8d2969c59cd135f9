"""What the algorithms of a diffusion stage share: the terms of a loss are (sample, step) pairs."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import final

import torch

from unirl.algorithms.base import Algorithm, AlgorithmOutput, Context, reduced
from unirl.models.diffusion_stage import DiffusionStage
from unirl.types.batch import Rows, dense
from unirl.types.metric import Metrics
from unirl.types.sample import Part

DiffusionContext = Context[DiffusionStage]


@dataclasses.dataclass(frozen=True, eq=False)
class Anchors(Rows):
    """pi_old of a micro-batch, frozen before the first update on a rollout.

    log_probs: `(N, S)`
    means:     `(N, S, *latent)`, for algorithms that measure a divergence from the old transition
    """

    log_probs: torch.Tensor = dense()
    means: torch.Tensor | None = dense(None)


class DiffusionAlgorithm(Algorithm[DiffusionStage]):
    """An estimator whose losses are `(N, S)`: one for each (sample, step)."""

    @abstractmethod
    def columns(self, part: Part) -> int:
        """S: how many (sample, step) terms each sample contributes."""

    @abstractmethod
    def anchors(self, context: DiffusionContext, part: Part, columns: slice) -> Anchors | None:
        """pi_old at these columns, asked for without gradient before the first update.

        None where the loss needs none, or where it is the policy itself: `context` tells whether `part` will be trained
        while the weights are unchanged.
        """

    @abstractmethod
    def loss(self, context: DiffusionContext, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        """The loss of each (sample, step) of `part` at `columns`."""

    @final
    def terms(self, part: Part) -> float:
        return float(len(part) * self.columns(part))

    @final
    def frozen_anchors(self, context: DiffusionContext, part: Part) -> list[Anchors | None]:
        with torch.no_grad():
            return [self.anchors(context, part, columns) for columns in self._forwards(part, context.replay_batch)]

    @final
    def backward(
        self, context: DiffusionContext, part: Part, anchors: list[Anchors | None], *, terms: float
    ) -> Metrics:
        outputs: list[AlgorithmOutput] = []
        for columns, anchor in zip(self._forwards(part, context.replay_batch), anchors, strict=True):
            output = self.loss(context, part, columns, anchor)
            # Of a pair of experts the one that is not trained may have made all of these steps: no weight, no gradient.
            if output.losses.requires_grad:
                (output.losses.sum() / terms).backward()
            outputs.append(dataclasses.replace(output, losses=output.losses.detach()))
        losses = torch.cat([output.losses.flatten() for output in outputs])
        return reduced(outputs, losses.double().mean(), float(len(losses)))

    def _forwards(self, part: Part, replay_batch: int | None) -> list[slice]:
        count = self.columns(part)
        size = replay_batch or count
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]
