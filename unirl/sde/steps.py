"""A pinned schedule, and one step of it for each row of a batch."""

from __future__ import annotations

import dataclasses

import torch

# Within this distance of 1, the first sigma counts as pure noise: DPM-Solver tables start at 0.99967, UniPC's at
# 1 - 1e-6. A table that starts at 0.999 is taken at its word.
_PURE_NOISE = 5e-4


@dataclasses.dataclass(frozen=True)
class Step:
    """One transition per row; every field is `(B,)` float32 but `index` (int64).

    index:      position in the schedule
    sigma:      noise level before the step
    sigma_next: noise level after it
    sigma_star: what the Flow kernel divides by: `sigma`, or the next sigma where the step starts from pure noise
    time:       what the model takes as its time
    """

    index: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    sigma_star: torch.Tensor
    time: torch.Tensor

    def repeat(self, times: int) -> Step:
        """The rows `times` over, as `torch.cat([x] * times)` orders them."""
        return Step(
            index=self.index.repeat(times),
            sigma=self.sigma.repeat(times),
            sigma_next=self.sigma_next.repeat(times),
            sigma_star=self.sigma_star.repeat(times),
            time=self.time.repeat(times),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of T steps. sigmas: `(T + 1,)` float32, strictly falling to 0; times: `(T,)` float32 model times.

    `Schedule(sigmas=[1, .5, 0], times=[1000, 500])` has two steps; the last one ends at 0 and is always deterministic.
    """

    sigmas: torch.Tensor
    times: torch.Tensor

    def __post_init__(self) -> None:
        if self.sigmas.dtype != torch.float32 or self.times.dtype != torch.float32:
            raise ValueError(f"a schedule is float32, got sigmas {self.sigmas.dtype} and times {self.times.dtype}")
        if len(self.sigmas) != len(self.times) + 1:
            raise ValueError(f"{len(self.times)} model times need {len(self.times) + 1} sigmas, got {len(self.sigmas)}")
        if not (self.sigmas[1:] < self.sigmas[:-1]).all() or float(self.sigmas[-1]) != 0.0:
            raise ValueError(f"sigmas must fall strictly to 0, got {self.sigmas.tolist()}")

    def __len__(self) -> int:
        return len(self.times)

    def at(self, index: torch.Tensor) -> Step:
        """The steps at `index` `(B,)`, on its device."""
        sigmas, times = self.sigmas.to(index.device), self.times.to(index.device)
        sigma, sigma_next = sigmas[index], sigmas[index + 1]
        starts_from_noise = (index == 0) & (sigma > 1 - _PURE_NOISE)
        sigma_star = torch.where(starts_from_noise, sigma_next, sigma)
        return Step(index=index, sigma=sigma, sigma_next=sigma_next, sigma_star=sigma_star, time=times[index])
