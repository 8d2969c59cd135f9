"""Critic: the values of a rollout, by the value head that is trained beside the policy, before the updates on it."""

from __future__ import annotations

import dataclasses

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.ar_stage import ARStage
from unirl.models.policy import Policy
from unirl.train.stack.planner import TokenGeometry
from unirl.types.sample import Part
from unirl.types.segment import TextSegment


class Critic(Remote):
    """Reads with the policy that its siblings train. geometry: how many rows, or tokens, in one forward."""

    def __init__(self, policy: Policy[ARStage], geometry: TokenGeometry) -> None:
        self._policy, self._geometry = policy, geometry

    @remote(Dispatch.DP_COLLECTIVE, reads=("segment", "conditions"))
    def valued(self, part: Part | None) -> Part | None:
        """A filled Part with the value before each token; 0 at tokens that are not trained."""
        with torch.no_grad(), self._policy.gathered():
            return None if part is None else self._valued(part)

    def _valued(self, part: Part) -> Part:
        segment = part.segment
        assert isinstance(segment, TextSegment), "values are those of responses"
        pieces = list(torch.zeros(len(segment.tokens)).split(segment.lengths.tolist()))
        for rows in self._geometry.cut(part, torch.arange(len(part))):
            micro = part.select(rows).to(self._policy.stage.bundle.device)
            values = self._policy.stage.values(micro).cpu().split(segment.lengths[rows].tolist())
            for row, own in zip(rows.tolist(), values, strict=True):
                pieces[row] = own
        return dataclasses.replace(part, segment=dataclasses.replace(segment, values=torch.cat(pieces)))
