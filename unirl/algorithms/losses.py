"""Losses as functions: tensors in, tensors out, no model, no config, no reduction over rows.

Suffixes: N samples, S trained steps. Every function returns one value per (sample, step); the caller averages them
once, over the whole optimizer step. `r = exp(new - old)`, A the advantage. Those without a suffix are elementwise:
`token_losses.py` takes them for tokens.
"""

from __future__ import annotations

import torch

from unirl.sde.strategy import gaussian_kl, per_row, row_mean

# exp(20) is 5e8: far beyond any ratio that trains, far below overflow. Bounding the exponent, not the result, keeps the
# gradient finite.
MAX_LOG_RATIO = 20.0
_SMALLEST_WEIGHT = 1e-5


def bounded_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """`exp(new - old)` with the exponent bounded to +-20, any shape. NaN stays NaN, in value and gradient."""
    return bounded_exp(log_probs - old_log_probs)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp(log r)` with the exponent bounded to +-20, any shape. NaN stays NaN, in value and gradient."""
    # torch.clamp passes NaN on but gives it the gradient 0, which would train on as if the row were not there.
    return torch.where(log_ratio.isnan(), log_ratio, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))` (PPO, arXiv 1707.06347, eq. 7), any shape."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def clipped_away(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Where the clip takes the gradient: the ratio has left the range in the direction of A. Bool, any shape."""
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def step_kl(
    means: torch.Tensor, other_means: torch.Tensor, stds: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """KL of the transitions at each recorded step, averaged over latent elements (by `weights` `(*latent)`).

    means, other_means: `(N, S, *latent)`; stds: `(N, S, 1, ...)`. Returns `(N, S)`.
    """
    count, steps = means.shape[:2]
    flat = gaussian_kl(means.flatten(0, 1), other_means.flatten(0, 1), stds.flatten(0, 1), weights)
    return flat.unflatten(0, (count, steps))


def divergence_masked_surrogate(
    ratio_NS: torch.Tensor, advantages_NS: torch.Tensor, kl_NS: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flow-DPPO: `-A r`, dropped (0) where KL(new, old) >= threshold and the ratio has already moved with A.

    Returns the loss and the bool mask of dropped elements, `(N, S)` each; dropped ones stay in the mean's denominator.
    """
    dropped = (kl_NS >= threshold) & clipped_away(ratio_NS, advantages_NS, 0.0, 0.0)
    return torch.where(dropped, 0, -advantages_NS * ratio_NS), dropped


def optimality(advantages: torch.Tensor, advantage_max: float) -> torch.Tensor:
    """DiffusionNFT's probability that a sample is a good one, `clip(A / (2 A_max) + 1/2, 0, 1)`."""
    return (advantages / (2 * advantage_max) + 0.5).clamp(0, 1)


def implied_velocities(velocity: torch.Tensor, old: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """DiffusionNFT's positive and negative policies, `v+ = (1-b) v_old + b v` and `v- = (1+b) v_old - b v`."""
    return (1 - beta) * old + beta * velocity, (1 + beta) * old - beta * velocity


def denoising_error(
    velocity: torch.Tensor,
    x_t: torch.Tensor,
    x_0: torch.Tensor,
    sigma: torch.Tensor,
    *,
    adaptive_weight: bool,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`|x0(v) - x0|^2 / w` with `x0(v) = x_t - sigma v`, for B points (DiffusionNFT, arXiv 2509.16117).

    w is the detached mean of `|x0(v) - x0|` in float64, at least 1e-5; 1 without adaptive weights.
    velocity, x_t, x_0: `(B, *latent)`; sigma: `(B,)`; weights: `(*latent)`, of the elements. Returns `(B,)`.
    """
    residual = x_t - per_row(sigma, x_t) * velocity - x_0
    if not adaptive_weight:
        return row_mean(residual**2, weights)
    weight = row_mean(residual.detach().double().abs(), weights).clamp(min=_SMALLEST_WEIGHT)
    return (row_mean(residual**2, weights) / weight).to(residual.dtype)


def flow_matching(
    velocity: torch.Tensor, x_0: torch.Tensor, noise: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """`|v - (eps - x_0)|^2`, averaged over elements (by `weights` `(*latent)`). All `(B, *latent)`; returns `(B,)`."""
    return row_mean((velocity - (noise - x_0)) ** 2, weights)
