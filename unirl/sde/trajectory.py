"""The only two denoising loops of the project. The loop knows no model; the model knows no loop.

`predict(latents, step, rows) -> velocity` is the model: latents `(B, *latent)`, one `Step` per row, and `rows` `(B,)`
naming the sample that each row belongs to (for its conditions). Sampling and replay call the same function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jaxtyping as jt
import torch

from unirl.sde.elements import Elements
from unirl.sde.noise import StepNoise
from unirl.sde.solver import History, Stepper
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import SDEStrategy
from unirl.types.segment import LatentSegment

_ALL_ALIKE = Elements()


@runtime_checkable
class Predict(Protocol):
    """The model of a walk."""

    def __call__(self, latents: torch.Tensor, step: Step, rows: torch.Tensor, /) -> torch.Tensor: ...


def sample_trajectory(  # noqa: PLR0913 - a bundle of these would be made at its only call and taken apart here
    predict: Predict,
    latents: torch.Tensor,
    schedule: Schedule,
    *,
    strategy: SDEStrategy,
    solver: Stepper,
    sde_indices: Sequence[int],
    noise: StepNoise,
    storage_dtype: torch.dtype,
    elements: Elements = _ALL_ALIKE,
) -> LatentSegment:
    """Walk from x_T `(N, *latent)` to x_0, stochastic at `sde_indices`, and record what replay needs.

    The trajectory stored is the trajectory walked: the next latent is rounded to `storage_dtype`, scored as stored, and
    the walk goes on from the rounded value.
    """
    count, device = len(latents), latents.device
    rows = torch.arange(count, device=device)
    kept = sorted({end for index in sde_indices for end in (index, index + 1)} | {len(schedule)})
    x = elements.pin(latents.to(storage_dtype))
    recorded = {0: x}
    log_probs: list[torch.Tensor] = []
    history: History | None = None
    for index in range(len(schedule)):
        step = schedule.at(torch.full((count,), index, device=device))
        velocity = predict(x, step, rows)
        if index in sde_indices:
            mean, std = strategy.mean(x, velocity, step), strategy.std(step, x)
            x = elements.pin(strategy.draw(mean, std, noise.draw(x.shape[1:]).to(device)).to(storage_dtype))
            log_probs.append(strategy.log_prob(x, mean, std, elements.weights))
            history = None  # a multistep solver starts anew after a stochastic step
        else:
            x_next, history = solver(x, velocity, step, history)
            x = elements.pin(x_next.to(storage_dtype))
        if index + 1 in kept:
            recorded[index + 1] = x
    return LatentSegment(
        latents=torch.stack([recorded[position] for position in kept], dim=1),
        positions=torch.tensor(kept),
        sigmas=schedule.sigmas,
        times=schedule.times,
        sde_indices=torch.tensor(list(sde_indices), dtype=torch.long),
        log_probs=torch.stack(log_probs, dim=1) if log_probs else latents.new_zeros(count, 0, dtype=torch.float32),
    )


@dataclasses.dataclass(frozen=True)
class Replay:
    """Transitions of N samples at S recorded steps under the present weights.

    log_probs: averaged over latent elements
    means:     of the transitions
    stds:      `(N, S, 1, ...)`
    dts:       `sigma_next - sigma`, below 0
    weights:   of the latent's elements, where they do not count alike
    """

    log_probs: jt.Float[torch.Tensor, "N S"]
    means: jt.Float[torch.Tensor, "N S *latent"]
    stds: jt.Float[torch.Tensor, "N S *ones"]
    dts: jt.Float[torch.Tensor, "S"]
    weights: jt.Float[torch.Tensor, "*latent"] | None = None


def replay_trajectory(
    predict: Predict,
    segment: LatentSegment,
    steps: torch.Tensor,
    *,
    strategy: SDEStrategy,
    elements: Elements = _ALL_ALIKE,
) -> Replay:
    """Score the recorded transitions at `steps` `(S,)` (schedule indices), all of them in one forward.

    Rows are (sample, step) pairs, sample-major. The recorded schedule is used as it is.
    """
    device = segment.latents.device
    steps = steps.to(segment.sde_indices.device)
    if not torch.isin(steps, segment.sde_indices).all():
        drawn = segment.sde_indices.tolist()
        raise ValueError(f"steps {steps.tolist()} have no density: stochastic in the rollout were {drawn}")
    count, chosen = len(segment), len(steps)
    schedule = Schedule(segment.sigmas, segment.times)
    x, x_next = segment.at(steps).flatten(0, 1), segment.at(steps + 1).flatten(0, 1)
    step = schedule.at(steps.to(device).repeat(count))
    rows = torch.arange(count, device=device).repeat_interleave(chosen)
    mean, std = strategy.mean(x, predict(x, step, rows), step), strategy.std(step, x)
    log_probs = strategy.log_prob(x_next, mean, std, elements.weights)
    return Replay(
        log_probs=log_probs.unflatten(0, (count, chosen)),
        means=mean.unflatten(0, (count, chosen)),
        stds=std.unflatten(0, (count, chosen)),
        dts=schedule.sigmas[steps + 1] - schedule.sigmas[steps],
        weights=elements.weights,
    )
