"""TrainStack: one backend and one algorithm; turns a rollout with advantages into optimizer steps."""

from __future__ import annotations

from unirl.algorithms.base import Anchors, Context, DiffusionAlgorithm, Progress
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.planner import Geometry, plan
from unirl.types.metric import Metrics, maximum, merge, total
from unirl.types.sample import Part


class TrainStack(Remote):
    """seed: key of the row shuffle."""

    def __init__(self, backend: FSDPBackend, algorithm: DiffusionAlgorithm, geometry: Geometry, *, seed: int) -> None:
        self._backend, self._algorithm, self._geometry, self._seed = backend, algorithm, geometry, seed

    @remote(Dispatch.DP_SCATTER)
    def train(self, part: Part, progress: Progress) -> Metrics:
        """All updates on one rollout. pi_old is frozen first, over the very micro-batches that are trained."""
        updates = plan(part.to(self._backend.stage.bundle.device), self._geometry, self._seed)
        on_policy = part.version is not None and bool((part.version == self._backend.version).all())
        contexts = [
            Context(self._backend.stage, self._backend, progress, unchanged=on_policy and number == 0)
            for number in range(len(updates))
        ]
        anchors = [
            [self._algorithm.frozen_anchors(context, micro, self._geometry.replay_batch) for micro in update]
            for context, update in zip(contexts, updates, strict=True)
        ]
        reports = [
            self._update(context, update, frozen, first=number == 0)
            for number, (context, update, frozen) in enumerate(zip(contexts, updates, anchors, strict=True))
        ]
        self._backend.finish_rollout()
        return merge(reports)

    def _update(
        self, context: Context, micros: list[Part], anchors: list[list[Anchors | None]], *, first: bool
    ) -> Metrics:
        if not micros:
            return {"train/empty_updates": total(1.0)}
        # One denominator for the whole optimizer step: cutting it into micro-batches does not change the gradient.
        terms = sum(len(micro) * self._algorithm.columns(micro) for micro in micros)
        reports = [
            self._algorithm.backward(
                context,
                micro,
                anchors=frozen,
                replay_batch=self._geometry.replay_batch,
                terms=terms,
            )
            for micro, frozen in zip(micros, anchors, strict=True)
        ]
        report = merge(reports)
        if first and "train/ratio_deviation" in report:
            report["train/first_ratio_deviation"] = maximum(report["train/ratio_deviation"].value)
        return merge([report, self._backend.step()])
