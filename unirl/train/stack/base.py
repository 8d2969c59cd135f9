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
        anchors = [[self._anchors(micro) for micro in update] for update in updates]
        reports = [
            self._update(update, frozen, progress, first=number == 0)
            for number, (update, frozen) in enumerate(zip(updates, anchors, strict=True))
        ]
        self._backend.finish_rollout()
        return merge(reports)

    def _update(
        self, micros: list[Part], anchors: list[list[Anchors | None]], progress: Progress, *, first: bool
    ) -> Metrics:
        if not micros:
            return {"train/empty_updates": total(1.0)}
        # One denominator for the whole optimizer step: cutting it into micro-batches does not change the gradient.
        terms = sum(len(micro) * self._algorithm.columns(micro) for micro in micros)
        reports = [
            self._algorithm.backward(
                Context(self._backend.stage, self._backend, progress),
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

    def _anchors(self, micro: Part) -> list[Anchors | None]:
        return self._algorithm.frozen_anchors(self._backend.stage, micro, self._geometry.replay_batch)
