"""What the ratio-based algorithms share: the trained steps of a recorded trajectory and pi_old."""

from __future__ import annotations

from typing import Literal

import torch

from unirl.algorithms.diffusion_base import Anchors, DiffusionContext
from unirl.sde.trajectory import Replay
from unirl.types.sample import Part
from unirl.types.segment import LatentSegment


def trajectory(part: Part) -> LatentSegment:
    """The recorded trajectory; an ODE rollout has no log-probs to train on."""
    assert isinstance(part.segment, LatentSegment), "ratio-based algorithms train on recorded trajectories"
    if len(part.segment.sde_indices) == 0:
        raise ValueError(
            "the rollout has no stochastic step; set sampling.noise_level above 0 and a step rule that picks steps"
        )
    return part.segment


def old_policy(
    context: DiffusionContext, part: Part, columns: slice, *, source: Literal["rollout", "replay"], with_means: bool
) -> Anchors | None:
    """pi_old at `columns`: what the rollout recorded, or a replay under the weights before the first update.

    None: the replay would be the very forward that the loss is going to do, so the loss takes its own (`or_itself`).
    """
    segment = trajectory(part)
    if source == "replay" and context.unchanged:
        return None
    if source == "rollout" and not with_means:
        return Anchors(log_probs=segment.log_probs[:, columns])
    replay = context.stage.replay(part, segment.sde_indices[columns])
    log_probs = replay.log_probs if source == "replay" else segment.log_probs[:, columns]
    return Anchors(log_probs=log_probs, means=replay.means if with_means else None)


def or_itself(anchors: Anchors | None, replay: Replay) -> Anchors:
    """The frozen pi_old, or the present policy where it is still pi_old."""
    return anchors or Anchors(log_probs=replay.log_probs.detach(), means=replay.means.detach())


def advantages_of(part: Part, columns: int) -> torch.Tensor:
    """`(N, S)`: every step of a sample carries its advantage."""
    assert part.advantages is not None, "advantages come before training"
    return part.advantages[:, None].expand(-1, columns)
