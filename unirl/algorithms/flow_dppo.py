"""Flow-DPPO: a trust region by divergence instead of a clipped ratio, on every stochastic denoising step."""

from __future__ import annotations

import dataclasses
from typing import Literal

from unirl.algorithms.base import AlgorithmOutput, Needs, beside_rollout
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm, DiffusionContext
from unirl.algorithms.losses import bounded_ratio, divergence_masked_surrogate, step_kl
from unirl.algorithms.trajectory_policy import advantages_of, old_policy, or_itself, trajectory
from unirl.types.sample import Part


@dataclasses.dataclass(frozen=True)
class FlowDPPO(DiffusionAlgorithm):
    """`-A r`, dropped where KL(new, old) of the transition reaches `kl_threshold` and the ratio has moved with A.

    The old transition means are replayed before the first update; `anchor` says where the old log-probs come from.
    """

    kl_threshold: float = 1e-5
    anchor: Literal["rollout", "replay"] = "replay"

    def __post_init__(self) -> None:
        if not self.kl_threshold > 0:
            raise ValueError(f"kl_threshold must be positive, got {self.kl_threshold}")

    @property
    def needs(self) -> Needs:
        return Needs()

    def columns(self, part: Part) -> int:
        return len(trajectory(part).sde_indices)

    def anchors(self, context: DiffusionContext, part: Part, columns: slice) -> Anchors | None:
        return old_policy(context, part, columns, source=self.anchor, with_means=True)

    def loss(self, context: DiffusionContext, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        steps = trajectory(part).sde_indices[columns]
        replay = context.stage.replay(part, steps, unchanged=context.unchanged)
        old = or_itself(anchors, replay)
        assert old.means is not None
        ratio = bounded_ratio(replay.log_probs, old.log_probs)
        kl = step_kl(replay.means.detach(), old.means, replay.stds, replay.weights)
        losses, dropped = divergence_masked_surrogate(ratio, advantages_of(part, len(steps)), kl, self.kl_threshold)
        output = AlgorithmOutput(
            losses,
            means={"train/clip_fraction": dropped.float(), "train/old_kl": kl},
            maxima={"train/ratio_deviation": (ratio.detach() - 1).abs()},
        )
        return beside_rollout(output, context, replay.log_probs, trajectory(part).log_probs[:, columns])
