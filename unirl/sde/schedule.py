"""Sigma schedules and shifts: functions of numbers.

Every schedule is float64 until `pin` rounds it once to the float32 table that is stored with the sample and consumed
verbatim.
"""

from __future__ import annotations

import math

import jaxtyping as jt
import torch


def uniform_sigmas(steps: int) -> jt.Float64[torch.Tensor, "T"]:
    """`linspace(1, 1/T, T)`: the base grid of most flow models."""
    return torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64)


def shift_sigmas(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """Static shift of the noise level, `k s / (1 + (k - 1) s)` (SD3, arXiv 2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def exponential_shift(sigmas: torch.Tensor, mu: float) -> torch.Tensor:
    """Dynamic shift `e^mu / (e^mu + 1/s - 1)` (FLUX); equals the static shift with `k = e^mu`."""
    return math.exp(mu) / (math.exp(mu) + (1 / sigmas - 1))


def linear_mu(tokens: int, *, base: tuple[int, float], top: tuple[int, float]) -> float:
    """mu on the line through (tokens, mu) = `base` and `top`; `tokens` counts image tokens after patchify."""
    return base[1] + (tokens - base[0]) * (top[1] - base[1]) / (top[0] - base[0])


def flux2_mu(tokens: int, steps: int) -> float:
    """mu of FLUX.2: fits to `tokens` (image tokens) at 10 and at 200 steps, and the line between them.

    Beyond 4300 tokens the fit of 200 steps holds for any number of them. Constants of black-forest-labs/flux2.
    """
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    return at_200 + (steps - 200) * (at_200 - at_10) / 190


def stretch_to_terminal(sigmas: torch.Tensor, terminal: float) -> torch.Tensor:
    """Stretch `1 - s` so that the last sigma is `terminal`. One step leaves nothing to stretch and is refused."""
    if len(sigmas) < 2:
        raise ValueError(f"a schedule that is stretched to a terminal sigma needs at least 2 steps, got {len(sigmas)}")
    gaps = 1 - sigmas
    return 1 - gaps * (1 - terminal) / gaps[-1]


def twice_shifted_sigmas(steps: int, shift: float, train_steps: int = 1000) -> jt.Float64[torch.Tensor, "T"]:
    """The table that diffusers' Euler scheduler makes by itself with a static shift.

    Its grid ends at an already shifted `1 / train_steps` and is shifted again (diffusers#13243): at shift 3 the last
    sigma is 0.0089. SD3 pipelines, and the published Flow-GRPO curves, use this table.
    """
    lowest = shift * (1 / train_steps) / (1 + (shift - 1) / train_steps)
    return shift_sigmas(torch.linspace(1.0, lowest, steps, dtype=torch.float64), shift)


def pin(sigmas: jt.Float64[torch.Tensor, "T"]) -> jt.Float32[torch.Tensor, "T+1"]:
    """Append the terminal 0 and round to float32. The table must fall strictly."""
    table = torch.cat([sigmas, sigmas.new_zeros(1)]).to(torch.float32)
    if not (table[1:] < table[:-1]).all() or not 0 < float(table[0]) <= 1:
        raise ValueError(f"sigmas must fall strictly from at most 1 to 0, got {table.tolist()}")
    return table
