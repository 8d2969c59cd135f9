"""Builds what our loops record from the plain tensors of a UniRL golden case."""

from __future__ import annotations

import torch

from tests.golden.golden import Case
from unirl.sde.steps import Step
from unirl.sde.strategy import STRATEGIES, SDEStrategy
from unirl.sde.trajectory import Predict, Replay, replay_trajectory
from unirl.types.segment import LatentSegment


def strategy_of(case: Case) -> SDEStrategy:
    """UniRL's kernel of the case, CPS with its unnormalised score."""
    names = {"flow": "flow", "dance": "dance", "cps": "cps_unnormalised"}
    return STRATEGIES[names[case.raw("kernel")]](case.raw("eta"))


def recorded(case: Case) -> LatentSegment:
    """The transitions `(N, S)` of the case as a trajectory: x at each SDE step and the latent that `v_old` draws."""
    x, steps = case.input("x"), torch.tensor(case.raw("sde_indices"))
    sigmas = case.input("sigmas", torch.float32)
    # A stand-in for what is not drawn yet: the recorded next latents are filled in once the means are known.
    unfilled = _segment(x, x, steps, sigmas)
    strategy = strategy_of(case)
    if "v_old" not in case.inputs:
        return unfilled
    replay = replay_trajectory(velocities(case.input("v_old"), steps), unfilled, steps, strategy=strategy)
    return _segment(x, strategy.draw(replay.means, replay.stds, case.input("noise")), steps, sigmas)


def velocities(velocity: torch.Tensor, steps: torch.Tensor) -> Predict:
    """A model that answers with the velocity `(N, S, ...)` of the (sample, step) it is asked for."""

    def predict(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        return velocity[rows, torch.searchsorted(steps, step.index)]

    return predict


def replayed(case: Case, segment: LatentSegment, velocity: torch.Tensor) -> Replay:
    """The recorded transitions under other velocities `(N, S, ...)`."""
    steps = segment.sde_indices
    return replay_trajectory(velocities(velocity, steps), segment, steps, strategy=strategy_of(case))


def _segment(x: torch.Tensor, x_next: torch.Tensor, steps: torch.Tensor, sigmas: torch.Tensor) -> LatentSegment:
    both = torch.stack([x, x_next], dim=2).flatten(1, 2)
    return LatentSegment(
        latents=both,
        positions=torch.stack([steps, steps + 1], dim=1).flatten(),
        sigmas=sigmas,
        times=1000 * sigmas[:-1],
        sde_indices=steps,
        log_probs=torch.zeros(x.shape[:2], dtype=x.dtype),
    )
