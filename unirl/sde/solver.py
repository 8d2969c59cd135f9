"""Deterministic steppers."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import torch

from unirl.sde.steps import Step
from unirl.sde.strategy import euler_step, per_row, upcast


@dataclasses.dataclass(frozen=True)
class History:
    """What a multistep solver remembers of the step before: its x0 prediction `(B, ...)` and its sigma `(B,)`."""

    clean: torch.Tensor
    sigma: torch.Tensor


@runtime_checkable
class Stepper(Protocol):
    """One deterministic step of rows `(B, ...)`: the next latent, and what the step after it must remember."""

    def __call__(
        self, x: torch.Tensor, velocity: torch.Tensor, step: Step, history: History | None
    ) -> tuple[torch.Tensor, History | None]: ...


def euler(
    x: torch.Tensor, velocity: torch.Tensor, step: Step, history: History | None
) -> tuple[torch.Tensor, History | None]:
    """First order."""
    return euler_step(x, velocity, step), None


def dpmpp_2m(
    x: torch.Tensor, velocity: torch.Tensor, step: Step, history: History | None
) -> tuple[torch.Tensor, History | None]:
    """DPM-Solver++(2M), midpoint form (arXiv 2211.01095, algorithm 2), in flow notation (alpha = 1 - sigma).

    Second order from the second deterministic step on; the first step, a step from sigma 1 and the step to sigma 0 are
    first order, where it equals Euler.
    """
    x, velocity = upcast(x), upcast(velocity)
    sigma, sigma_next = (per_row(c.to(x.dtype), x) for c in (step.sigma, step.sigma_next))
    clean = x - sigma * velocity
    remembered = History(clean=clean, sigma=step.sigma)
    first_order = history is None or bool((step.sigma_next == 0).any()) or bool((history.sigma >= 1).any())
    if history is None or first_order:
        return euler_step(x, velocity, step), remembered
    before = per_row(history.sigma.to(x.dtype), x)
    h, h_before = _log_snr(sigma_next) - _log_snr(sigma), _log_snr(sigma) - _log_snr(before)
    direction = clean + (clean - history.clean) * h / (2 * h_before)
    return sigma_next / sigma * x - (1 - sigma_next) * torch.expm1(-h) * direction, remembered


def _log_snr(sigma: torch.Tensor) -> torch.Tensor:
    """lambda = log(alpha / sigma)."""
    return torch.log1p(-sigma) - sigma.log()


SOLVERS: dict[str, Stepper] = {"euler": euler, "dpmpp_2m": dpmpp_2m}
