"""TrainStack: one backend and one algorithm; turns a rollout with advantages into optimizer steps."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.base import Algorithm, Context, Progress
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.planner import DiffusionGeometry, Geometry, plan
from unirl.types.metric import Metrics, maximum, merge, total
from unirl.types.sample import Part


class TrainStack(Remote):
    """seed: key of the row shuffle."""

    def __init__(
        self, backend: FSDPBackend[Any, Any], algorithm: Algorithm[Any], geometry: Geometry, *, seed: int
    ) -> None:
        self._backend, self._algorithm, self._geometry, self._seed = backend, algorithm, geometry, seed

    @remote(Dispatch.DP_SCATTER, reads=("segment", "conditions"))
    def train(self, part: Part, progress: Progress) -> Metrics:
        """All updates on one rollout. pi_old is frozen first, over the very micro-batches that are trained."""
        backend, geometry = self._backend, self._geometry
        updates = plan(part.to(backend.device), geometry, self._seed)
        on_policy = part.version is not None and bool((part.version == backend.version).all())
        replay_batch = geometry.replay_batch if isinstance(geometry, DiffusionGeometry) else None
        contexts = [
            Context(backend.stage, backend, progress, unchanged=on_policy and number == 0, replay_batch=replay_batch)
            for number in range(len(updates))
        ]
        anchors = [
            [self._algorithm.frozen_anchors(context, micro) for micro in update]
            for context, update in zip(contexts, updates, strict=True)
        ]
        reports = [
            self._update(context, update, frozen, first=number == 0)
            for number, (context, update, frozen) in enumerate(zip(contexts, updates, anchors, strict=True))
        ]
        backend.finish_rollout()
        return merge(reports)

    def _update(self, context: Context[Any], micros: list[Part], anchors: list[Any], *, first: bool) -> Metrics:
        # One denominator for the whole optimizer step: cutting it into micro-batches does not change the gradient.
        terms = sum(self._algorithm.terms(micro) for micro in micros)
        if terms == 0:
            return {"train/empty_updates": total(1.0)}
        reports = [
            self._algorithm.backward(context, micro, frozen, terms=terms)
            for micro, frozen in zip(micros, anchors, strict=True)
        ]
        report = merge(reports)
        if first and "train/ratio_deviation" in report:
            report["train/first_ratio_deviation"] = maximum(report["train/ratio_deviation"].value)
        return merge([report, self._backend.step()])
