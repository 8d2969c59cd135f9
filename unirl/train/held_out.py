"""HeldOutLoss: the loss of given responses under the present weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.ar_stage import ARStage
from unirl.models.policy import Policy
from unirl.train.stack.planner import TokenGeometry
from unirl.types.metric import Metrics, mean, merge
from unirl.types.sample import Part
from unirl.types.segment import TextSegment


class HeldOutLoss(Remote):
    """geometry: how rows are cut into forwards; rows: at most so many in one; weights: which ones are measured"""

    def __init__(
        self, policy: Policy[ARStage], geometry: TokenGeometry, *, rows: int, weights: Literal["live", "ema"]
    ) -> None:
        self._policy, self._geometry, self._rows, self._weights = policy, geometry, rows, weights

    @remote(Dispatch.DP_COLLECTIVE, reads=("segment", "conditions"))
    def measure(self, part: Part | None) -> Metrics | None:
        """`loss`: cross entropy of the trained tokens of `part`, their mean."""
        other = self._policy.ema() if self._weights == "ema" else nullcontext()
        with torch.no_grad(), other, self._policy.gathered():
            return None if part is None else self._measured(part)

    def _measured(self, part: Part) -> Metrics:
        batches = torch.arange(len(part)).split(self._rows)
        micros = [part.select(rows) for batch in batches for rows in self._geometry.cut(part, batch)]
        return merge(self._loss(micro) for micro in micros)

    def _loss(self, part: Part) -> Metrics:
        part = part.to(self._policy.stage.bundle.device)
        assert isinstance(part.segment, TextSegment), "only responses have a loss here"
        mask = part.segment.loss_mask
        log_probs = self._policy.stage.replay(part).log_probs[mask].double()
        return {"loss": mean(float(-log_probs.mean()), float(mask.sum()))}
