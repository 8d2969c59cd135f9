"""DiffusionNFT (arXiv 2509.16117): reinforcement on the forward process, without log-probs or a stored trajectory.

Samples come from the EMA ("old") weights by any solver. Good samples pull the velocity towards them, bad ones push it
away along the implied negative policy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm, DiffusionContext
from unirl.algorithms.losses import denoising_error, implied_velocities, optimality
from unirl.models.policy import Weights
from unirl.sde.strategy import row_mean
from unirl.types.sample import Part
from unirl.types.seed import generator
from unirl.types.segment import LatentSegment


@dataclasses.dataclass(frozen=True)
class DiffusionNFT(DiffusionAlgorithm):
    """`(A_max / beta) [q L+ + (1 - q) L-] + kl_coef mean (v - v_ref)^2` at times of the sampler's own schedule.

    beta:            mixing weight of the implied policies `v+-`; not a KL coefficient
    kl_coef:         weight of the squared distance to the reference velocity
    advantage_max:   A_max: advantages saturate there
    time_fraction:   share of the schedule's steps that each sample trains on, drawn anew for each sample
    adaptive_weight: divide each branch by its own mean absolute error (detached)
    """

    beta: float = 1.0
    kl_coef: float = 1e-4
    advantage_max: float = 5.0
    time_fraction: float = 0.99
    adaptive_weight: bool = True

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must not be negative, got {self.kl_coef}")
        if not self.advantage_max > 0:
            raise ValueError(f"advantage_max must be positive, got {self.advantage_max}")
        if not 0 < self.time_fraction <= 1:
            raise ValueError(f"time_fraction must be in (0, 1], got {self.time_fraction}")

    @property
    def needs(self) -> Needs:
        return Needs(ema_rollout=True, reference=self.kl_coef > 0, trajectory=False)

    def columns(self, part: Part) -> int:
        return max(int(self.time_fraction * _segment(part).num_steps), 1)

    def anchors(self, context: DiffusionContext, part: Part, columns: slice) -> Anchors | None:
        # v_old is the EMA policy, which stands still during the updates on a rollout: it needs no freezing.
        return None

    def loss(self, context: DiffusionContext, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        x_0 = _segment(part).final.float()
        index, noise = self._draws(part, columns, x_0)
        schedule = context.stage.schedule(part)
        sigma, time = schedule.sigmas[index].to(x_0.device), schedule.times[index].to(x_0.device)
        assert part.advantages is not None
        weights = part.guidance_branches.positive.weights
        x_t = context.stage.noised(part.guidance_branches, x_0, noise, sigma)
        predict = functools.partial(
            context.stage.velocity,
            part.guidance_branches,
            x_t,
            sigma=sigma,
            time=time,
            guidance=part.diffusion_sampling.guidance,
        )
        # Other weights come first: swapping them under a graph that is still to be walked back is asking for trouble.
        with torch.no_grad(), context.weights.ema():
            old_velocity = predict()
        reference = self._reference(predict, context.weights)
        velocity = predict()
        quality = optimality(part.advantages, self.advantage_max)[:, None].expand(sigma.shape)
        positive, negative = (
            denoising_error(
                implied.flatten(0, 1),
                x_t.flatten(0, 1),
                x_0[:, None].expand(x_t.shape).flatten(0, 1),
                sigma.flatten(),
                adaptive_weight=self.adaptive_weight,
                weights=weights,
            ).unflatten(0, sigma.shape)
            for implied in implied_velocities(velocity, old_velocity, self.beta)
        )
        policy = quality * positive + (1 - quality) * negative
        losses = policy * (self.advantage_max / self.beta)
        means = {"train/policy_loss": policy.detach(), "train/quality": quality}
        if reference is not None:
            distance = row_mean(((velocity - reference) ** 2).flatten(0, 1), weights).unflatten(0, sigma.shape)
            losses = losses + self.kl_coef * distance
            means["train/kl"] = distance.detach()
        return AlgorithmOutput(losses, means)

    def _draws(self, part: Part, columns: slice, x_0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Schedule indices `(N, K)` and noise `(N, K, *latent)`, keyed by sample: no batch split changes them."""
        steps, chosen = _segment(part).num_steps, range(self.columns(part))[columns]
        indices, noises = [], []
        for sample_id in part.ids:
            source = generator(part.diffusion_sampling.seed, "nft", sample_id)
            order = torch.randperm(steps, generator=source)
            draws = torch.randn((self.columns(part), *x_0.shape[1:]), generator=source)
            indices.append(order[chosen.start : chosen.stop])
            noises.append(draws[chosen.start : chosen.stop])
        return torch.stack(indices), torch.stack(noises).to(x_0.device)

    def _reference(self, predict: Callable[[], torch.Tensor], weights: Weights) -> torch.Tensor | None:
        if self.kl_coef == 0:
            return None
        with torch.no_grad(), weights.reference():
            return predict()


def _segment(part: Part) -> LatentSegment:
    assert isinstance(part.segment, LatentSegment), "NFT trains on generated latents"
    return part.segment
