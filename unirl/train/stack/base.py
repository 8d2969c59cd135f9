"""TrainStack: one backend and one algorithm; turns a rollout with advantages into optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Generic, TypeVar

from unirl.algorithms.base import Algorithm, Context, Progress
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.planner import Batch, DiffusionGeometry, Geometry, plan
from unirl.types.metric import Metrics, maximum, merge, total
from unirl.types.sample import Part

Stage = TypeVar("Stage")


@dataclasses.dataclass(frozen=True)
class Micro(Generic[Stage]):
    """One forward and backward. idle: it adds nothing, and keeps this rank in step with those that have more rows."""

    context: Context[Stage]
    part: Part
    anchors: Any
    idle: bool


class TrainStack(Remote):
    """Trains on the rows of this rank. All ranks take the same optimizer steps."""

    def __init__(self, backend: FSDPBackend[Any, Any], algorithm: Algorithm[Any], geometry: Geometry) -> None:
        self._backend, self._algorithm, self._geometry = backend, algorithm, geometry

    @remote(Dispatch.DP_SCATTER, reads=("segment", "conditions"))
    def train(self, batch: Batch, progress: Progress) -> Metrics:
        """All updates on one rollout. pi_old is frozen first, over the very micro-batches that are trained."""
        batch = batch.to(self._backend.device)
        updates = [
            self._frozen(self._context(batch, progress, first=number == 0), parts, batch)
            for number, parts in enumerate(plan(batch, self._geometry))
        ]
        reports = [self._update(micros, first=number == 0) for number, micros in enumerate(updates)]
        self._backend.finish_rollout()
        return merge(reports)

    def _context(self, batch: Batch, progress: Progress, *, first: bool) -> Context[Any]:
        backend, geometry, version = self._backend, self._geometry, batch.part.version
        on_policy = version is not None and bool((version == backend.version).all())
        return Context(
            backend.stage,
            backend,
            progress,
            unchanged=first and backend.world.all(on_policy),
            replay_batch=geometry.replay_batch if isinstance(geometry, DiffusionGeometry) else None,
        )

    def _frozen(self, context: Context[Any], parts: list[Part], batch: Batch) -> list[Micro[Any]]:
        """The micro-batches of an update with their anchors; where ranks must be even, as many on each."""
        live = [part for part in parts if self._algorithm.terms(part) > 0]
        (most,) = self._backend.world.highest([len(live)]) if self._backend.spread.even else [len(live)]
        idle = [self._algorithm.idle(batch.part)] * (round(most) - len(live))
        return [
            Micro(context, part, self._algorithm.frozen_anchors(context, part), idle=number >= len(live))
            for number, part in enumerate([*live, *idle])
        ]

    def _update(self, micros: list[Micro[Any]], *, first: bool) -> Metrics:
        # One denominator for the whole optimizer step: cutting it into micro-batches, or spreading it over ranks, does
        # not change the gradient.
        own = sum(self._algorithm.terms(micro.part) for micro in micros if not micro.idle)
        (terms,) = self._backend.world.total([own])
        if terms == 0:
            return self._told_once({"train/empty_updates": total(1.0)})
        reports = [self._trained(micro, terms, last=micro is micros[-1]) for micro in micros]
        report = merge(reports)
        if first and "train/ratio_deviation" in report:
            report["train/first_ratio_deviation"] = maximum(report["train/ratio_deviation"].value)
        return merge([report, self._told_once(self._backend.step())])

    def _trained(self, micro: Micro[Any], terms: float, *, last: bool) -> Metrics:
        with self._backend.spread.micro_batch(last=last):
            report = self._algorithm.backward(
                micro.context, micro.part, micro.anchors, terms=math.inf if micro.idle else terms
            )
        return {} if micro.idle else report

    def _told_once(self, report: Metrics) -> Metrics:
        """What is the same on all ranks, and would be counted by each of them."""
        return report if self._backend.rank_info.dp_rank == 0 else {}
