"""Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate on every stochastic denoising step.

MixGRPO is this with a moving window of stochastic steps, DanceGRPO this with the Dance kernel: both are recipes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs, Progress, beside_rollout
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm, DiffusionContext
from unirl.algorithms.losses import bounded_ratio, clipped_away, clipped_surrogate, step_kl
from unirl.algorithms.trajectory_policy import advantages_of, old_policy, or_itself, trajectory
from unirl.sde.trajectory import Replay
from unirl.types.sample import Part


@dataclasses.dataclass(frozen=True)
class FlowGRPO(DiffusionAlgorithm):
    """`max(-A r, -A clip(r, 1 - low, 1 + high)) + kl_coef KL(pi, pi_ref)` per (sample, step).

    clip_low, clip_high: clip range of the ratio of mean log-probs (hence its small numbers)
    clip_end:            factor that the range has reached at the end of the run, linearly
    kl:                  "gaussian" is the KL of the transitions; "flow_grpo" leaves -dt out of std^2, as its authors do
    anchor:              pi_old as recorded in the rollout, or replayed before the first update in the training geometry
    advantage_clip:      bound on |A|; None for none
    """

    clip_low: float = 1e-4
    clip_high: float = 1e-4
    clip_end: float = 1.0
    kl_coef: float = 0.04
    kl: Literal["gaussian", "flow_grpo"] = "gaussian"
    anchor: Literal["rollout", "replay"] = "rollout"
    advantage_clip: float | None = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ValueError(
                f"clip_low must be in (0, 1) and clip_high positive, got {self.clip_low} and {self.clip_high}"
            )
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}")
        if not self.clip_end > 0:
            raise ValueError(f"clip_end must be positive, got {self.clip_end}")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip must be positive or null, got {self.advantage_clip}")

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_coef > 0)

    def columns(self, part: Part) -> int:
        return len(trajectory(part).sde_indices)

    def anchors(self, context: DiffusionContext, part: Part, columns: slice) -> Anchors | None:
        return old_policy(context, part, columns, source=self.anchor, with_means=False)

    def loss(self, context: DiffusionContext, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        steps = trajectory(part).sde_indices[columns]
        reference = self._reference(context, part, steps)
        replay = context.stage.replay(part, steps, unchanged=context.unchanged)
        ratio = bounded_ratio(replay.log_probs, or_itself(anchors, replay).log_probs)
        advantages = self._advantages(part, len(steps))
        low, high = self._clip_range(context.progress)
        losses = clipped_surrogate(ratio, advantages, low, high)
        means = {"train/clip_fraction": clipped_away(ratio, advantages, low, high).float()}
        if reference is not None:
            kl = self._kl(replay, reference)
            losses = losses + self.kl_coef * kl
            means["train/kl"] = kl.detach()
        output = AlgorithmOutput(losses, means, maxima={"train/ratio_deviation": (ratio.detach() - 1).abs()})
        return beside_rollout(output, context, replay.log_probs, trajectory(part).log_probs[:, columns])

    def _reference(self, context: DiffusionContext, part: Part, steps: torch.Tensor) -> Replay | None:
        if self.kl_coef == 0:
            return None
        with torch.no_grad(), context.weights.reference():
            return context.stage.replay(part, steps)

    def _kl(self, replay: Replay, reference: Replay) -> torch.Tensor:
        kl = step_kl(replay.means, reference.means, replay.stds, replay.weights)
        return kl * -replay.dts.to(kl.device) if self.kl == "flow_grpo" else kl

    def _advantages(self, part: Part, steps: int) -> torch.Tensor:
        advantages, bound = advantages_of(part, steps), self.advantage_clip
        return advantages if bound is None else advantages.clamp(-bound, bound)

    def _clip_range(self, progress: Progress) -> tuple[float, float]:
        factor = 1 + (self.clip_end - 1) * progress.fraction
        return self.clip_low * factor, self.clip_high * factor
