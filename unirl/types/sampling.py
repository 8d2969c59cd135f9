"""How a sample is made: the single source of truth, stored on the Part and read again in replay."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from unirl.types.steps import AllSteps, NoSteps, StepRule

_COLDEST = 1e-3  # logits divided by less may leave float32


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


@dataclasses.dataclass(frozen=True)
class ARSamplingParams:
    """Settings of one rollout of text; what is left out is off.

    max_new_tokens: the longest response, its end token included
    temperature:    at least 0.001; 0 takes the likeliest token (evaluations only: it has no log-probs to train on)
    top_p, top_k:   sample among the likeliest tokens only: of this much probability, or this many (0 is off)
    stop:           a response ends with the token that completes one of these strings, which its text then lacks; a
                    special token of the tokenizer (`</s>`) ends it as an end token does
    stop_token_ids: end tokens beside the model's own. The text of a response lacks its end token, whatever kind it is
    seed:           key of all draws of these samples (0 is a seed like any other)
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        refuse_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 is off), got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 is off), got {self.top_k}")
        if "" in self.stop:
            raise ValueError(f"stop holds an empty string, which every text contains: {list(self.stop)}")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids are ids of tokens, 0 or more, got {list(self.stop_token_ids)}")

    @property
    def truncated_support(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary only."""
        return self.top_p < 1 or self.top_k > 0


def refuse_temperature(temperature: float) -> None:
    """ValueError for one whose log-probs would not be finite."""
    if temperature != 0 and not (math.isfinite(temperature) and temperature >= _COLDEST):
        raise ValueError(f"temperature must be 0 (the likeliest token) or at least {_COLDEST}, got {temperature}")


SamplingParams = DiffusionSamplingParams | ARSamplingParams
