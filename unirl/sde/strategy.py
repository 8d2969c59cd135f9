"""One-step transition kernels. A kernel gives mean and std; drawing and log-prob are written once, in the base.

| kernel | mean | std |
|---|---|---|
| Flow | x (1 + s^2 dt/(2 sigma)) + v (1 + s^2 (1 - sigma)/(2 sigma)) dt, s = a sqrt(sigma/(1 - sigma*)) | s sqrt(-dt) |
| Dance | the same with s = a | a sqrt(-dt) |
| CPS | x0 (1 - sigma') + n sqrt(sigma'^2 - s^2), x0 = x - sigma v, n = x + (1 - sigma) v, s = sigma' sin(a pi/2) | s |

Sources: Flow-GRPO (arXiv 2505.05470, eq. 9), DanceGRPO (arXiv 2505.07818), coefficients-preserving sampling
(arXiv 2509.05952).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod

import jaxtyping as jt
import torch

from unirl.sde.steps import Step

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def upcast(x: jt.Float[torch.Tensor, "*shape"]) -> jt.Float[torch.Tensor, "*shape"]:
    """float32, or float64 where the input is: half precision never enters transition maths."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def per_row(
    value: jt.Float[torch.Tensor, "B"], like: jt.Float[torch.Tensor, "B *latent"]
) -> jt.Float[torch.Tensor, "B *ones"]:
    """A column shaped to multiply `like`."""
    return value.reshape(-1, *([1] * (like.ndim - 1)))


def row_mean(
    x: jt.Float[torch.Tensor, "B *latent"], weights: jt.Float[torch.Tensor, "*latent"] | None = None
) -> jt.Float[torch.Tensor, "B"]:
    """Mean over all but the batch dimension, weighted by element where `weights` are given."""
    if weights is None:
        return x.flatten(1).mean(1)
    # An element of weight 0 is left out, not multiplied by 0: it may be infinite.
    weighted = torch.where(weights > 0, x * weights.to(x.dtype), 0)
    return weighted.flatten(1).sum(1) / weights.sum().to(x.dtype)


def euler_step(
    x: jt.Float[torch.Tensor, "B *latent"], velocity: jt.Float[torch.Tensor, "B *latent"], step: Step
) -> jt.Float[torch.Tensor, "B *latent"]:
    """The probability-flow ODE, `x + v dt`."""
    x = upcast(x)
    dt = step.sigma_next.to(x.dtype) - step.sigma.to(x.dtype)
    return x + velocity.to(x.dtype) * per_row(dt, x)


@dataclasses.dataclass(frozen=True)
class SDEStrategy(ABC):
    """A Gaussian transition from `sigma` to `sigma_next`.

    level: the amount of noise (eta); 0 is the Euler ODE, bit for bit
    """

    level: float

    def mean(
        self, x: jt.Float[torch.Tensor, "B *latent"], velocity: jt.Float[torch.Tensor, "B *latent"], step: Step
    ) -> jt.Float[torch.Tensor, "B *latent"]:
        """Mean of the transition."""
        if self.level == 0:
            return euler_step(x, velocity, step)
        x = upcast(x)
        return self._mean(x, velocity.to(x.dtype), _columns(step, x))

    def std(self, step: Step, like: jt.Float[torch.Tensor, "B *latent"]) -> jt.Float[torch.Tensor, "B *ones"]:
        """Standard deviation of the transition, `(B, 1, ...)` to broadcast against `like`."""
        return self._std(_columns(step, upcast(like)))

    def draw(
        self,
        mean: jt.Float[torch.Tensor, "B *latent"],
        std: jt.Float[torch.Tensor, "B *ones"],
        noise: jt.Float[torch.Tensor, "B *latent"],
    ) -> jt.Float[torch.Tensor, "B *latent"]:
        """The next latent for a given standard normal `noise`."""
        return mean + std * noise.to(mean.dtype)

    def log_prob(
        self,
        x_next: jt.Float[torch.Tensor, "B *latent"],
        mean: jt.Float[torch.Tensor, "B *latent"],
        std: jt.Float[torch.Tensor, "B *ones"],
        weights: jt.Float[torch.Tensor, "*latent"] | None = None,
    ) -> jt.Float[torch.Tensor, "B"]:
        """Gaussian log-density of `x_next`, averaged over latent elements (by `weights`)."""
        residual = x_next.to(mean.dtype) - mean
        return row_mean(-(residual**2) / (2 * std**2) - std.log() - _LOG_SQRT_2PI, weights)

    @abstractmethod
    def _mean(self, x: torch.Tensor, velocity: torch.Tensor, step: Step) -> torch.Tensor: ...

    @abstractmethod
    def _std(self, step: Step) -> torch.Tensor: ...


def _columns(step: Step, like: torch.Tensor) -> Step:
    """The step with its columns in the dtype and rank of `like`."""
    sigma, sigma_next, sigma_star = (
        per_row(c.to(like.device, like.dtype), like) for c in (step.sigma, step.sigma_next, step.sigma_star)
    )
    return Step(index=step.index, sigma=sigma, sigma_next=sigma_next, sigma_star=sigma_star, time=step.time)


def _reverse_sde_mean(x: torch.Tensor, velocity: torch.Tensor, step: Step, s: torch.Tensor | float) -> torch.Tensor:
    """Euler-Maruyama drift of the reverse SDE with diffusion coefficient `s`."""
    dt = step.sigma_next - step.sigma
    pull = s**2 / (2 * step.sigma)
    return x * (1 + pull * dt) + velocity * (1 + pull * (1 - step.sigma)) * dt


@dataclasses.dataclass(frozen=True)
class FlowSDE(SDEStrategy):
    """Flow-GRPO's kernel; the first step, where 1 - sigma is 0, divides by 1 - sigma_next."""

    def _mean(self, x: torch.Tensor, velocity: torch.Tensor, step: Step) -> torch.Tensor:
        return _reverse_sde_mean(x, velocity, step, self._coefficient(step))

    def _std(self, step: Step) -> torch.Tensor:
        return self._coefficient(step) * (step.sigma - step.sigma_next).sqrt()

    def _coefficient(self, step: Step) -> torch.Tensor:
        return self.level * (step.sigma / (1 - step.sigma_star)).sqrt()


@dataclasses.dataclass(frozen=True)
class DanceSDE(SDEStrategy):
    """DanceGRPO's kernel: a constant diffusion coefficient."""

    def _mean(self, x: torch.Tensor, velocity: torch.Tensor, step: Step) -> torch.Tensor:
        return _reverse_sde_mean(x, velocity, step, self.level)

    def _std(self, step: Step) -> torch.Tensor:
        return self.level * (step.sigma - step.sigma_next).sqrt()


@dataclasses.dataclass(frozen=True)
class CPS(SDEStrategy):
    """Coefficients-preserving sampling: the noise that is injected replaces predicted noise of the same power."""

    def _mean(self, x: torch.Tensor, velocity: torch.Tensor, step: Step) -> torch.Tensor:
        clean = x - step.sigma * velocity
        noise = x + (1 - step.sigma) * velocity
        return clean * (1 - step.sigma_next) + noise * (step.sigma_next**2 - self._std(step) ** 2).sqrt()

    def _std(self, step: Step) -> torch.Tensor:
        return step.sigma_next * math.sin(self.level * math.pi / 2)


@dataclasses.dataclass(frozen=True)
class CPSUnnormalised(CPS):
    """CPS with the score that published CPS settings assume: minus the mean squared residual, without `1 / (2 std^2)`.

    Its log-ratio is `2 std^2` times the true one, a different factor at every step; clip ranges do not carry over.
    """

    def log_prob(
        self,
        x_next: jt.Float[torch.Tensor, "B *latent"],
        mean: jt.Float[torch.Tensor, "B *latent"],
        std: jt.Float[torch.Tensor, "B *ones"],
        weights: jt.Float[torch.Tensor, "*latent"] | None = None,
    ) -> jt.Float[torch.Tensor, "B"]:
        return row_mean(-((x_next.to(mean.dtype) - mean) ** 2), weights)


STRATEGIES: dict[str, type[SDEStrategy]] = {
    "flow": FlowSDE,
    "dance": DanceSDE,
    "cps": CPS,
    "cps_unnormalised": CPSUnnormalised,
}


def gaussian_kl(
    mean: jt.Float[torch.Tensor, "B *latent"],
    other_mean: jt.Float[torch.Tensor, "B *latent"],
    std: jt.Float[torch.Tensor, "B *ones"],
    weights: jt.Float[torch.Tensor, "*latent"] | None = None,
) -> jt.Float[torch.Tensor, "B"]:
    """KL of two Gaussians with one std, averaged over elements (by `weights`): `(mean - other)^2 / (2 std^2)`."""
    return row_mean((mean - other_mean) ** 2 / (2 * std**2), weights)
