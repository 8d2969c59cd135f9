"""How a sample is made: the single source of truth, stored on the Part and read again in replay."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from unirl.types.steps import AllSteps, NoSteps, StepRule


@dataclasses.dataclass(frozen=True)
class DiffusionSamplingParams:
    """Settings of one diffusion rollout.

    steps:              denoising steps T; the schedule has T + 1 sigmas
    guidance:           classifier-free guidance scale; 1 means that no unconditional forward is done
    height, width:      pixels
    frames:             of a video; 1 for a picture
    seed:               key of all noise of these samples (0 is a seed like any other)
    noise_level:        level of the SDE (eta); 0 is the ODE
    strategy:           transition kernel of the stochastic steps (unirl/sde/strategy.py)
    solver:             stepper of the deterministic steps (unirl/sde/solver.py)
    sde:                which steps are stochastic
    shift:              time shift of the schedule; None takes the family's own
    negative_prompt:    text of the unconditional branch
    storage_dtype:      the dtype in which latents are stored, and thus walked
    same_initial_noise: all samples of a group start from one x_T
    """

    steps: int
    height: int
    width: int
    frames: int = 1
    guidance: float = 1.0
    seed: int = 0
    noise_level: float = 0.7
    strategy: Literal["flow", "dance", "cps", "cps_unnormalised"] = "flow"
    solver: Literal["euler", "dpmpp_2m"] = "euler"
    sde: StepRule = dataclasses.field(default_factory=AllSteps)
    shift: float | None = None
    negative_prompt: str = ""
    storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    same_initial_noise: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.height < 1 or self.width < 1 or self.frames < 1:
            size = f"{self.height} x {self.width}, {self.frames} frames"
            raise ValueError(f"height, width and frames must be positive, got {size}")
        if not (math.isfinite(self.guidance) and self.guidance >= 1):
            raise ValueError(f"guidance must be at least 1 (1 = none), got {self.guidance}")
        if not (math.isfinite(self.noise_level) and self.noise_level >= 0):
            raise ValueError(f"noise_level must not be negative, got {self.noise_level}")
        if self.strategy.startswith("cps") and self.noise_level > 1:
            raise ValueError(f"noise_level of the CPS kernel is in [0, 1], got {self.noise_level}")
        if self.shift is not None and not self.shift > 0:
            raise ValueError(f"shift must be positive, got {self.shift}")
        self.resolve_sde_indices(0)

    def resolve_sde_indices(self, rollout_id: int) -> tuple[int, ...]:
        """Sorted indices in [0, steps - 1) of this rollout's stochastic steps; empty at noise level 0 (the ODE)."""
        chosen = self.sde.indices(self.steps, rollout_id)
        return chosen if self.noise_level > 0 else ()

    def deterministic(self) -> DiffusionSamplingParams:
        """The same sampling as an ODE, for evaluation; it may then take fewer steps than the step rule would fit.

        Without noise in its steps, samples of a group that start from one x_T would be one picture: each has its own.
        """
        return dataclasses.replace(self, noise_level=0.0, sde=NoSteps(), same_initial_noise=False)
