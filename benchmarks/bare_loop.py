"""What a person would write by hand for one model: the yardstick of the benchmark, with the same mathematics."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Workload:
    """One Flow-GRPO step. trained: how many of the leading denoising steps are stochastic and trained."""

    prompts: int = 2
    group: int = 8
    steps: int = 10
    trained: int = 9
    guidance: float = 4.5
    level: float = 0.7
    clip: float = 1e-4
    guidance_gradient: bool = False

    @property
    def samples(self) -> int:
        return self.prompts * self.group


def bare_step(
    transformer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    embeddings: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    sigmas: torch.Tensor,
    shape: tuple[int, ...],
    work: Workload,
) -> torch.Tensor:
    """Roll out, score (brightness of x_0), one clipped update; returns the final latents.

    embeddings: tokens and pooled of the prompts, then of the unconditional branch, one row a sample
    """
    tokens, pooled, no_tokens, no_pooled = embeddings

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        def branch(latents: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            time = (sigma * 1000).expand(len(latents))
            return transformer(latents, text, vector, time, return_dict=False)[0]

        if work.guidance == 1:
            return branch(x, tokens, pooled)
        if torch.is_grad_enabled() and not work.guidance_gradient:
            with torch.no_grad():
                without = branch(x, no_tokens, no_pooled)
            with_text = branch(x, tokens, pooled)
        else:
            both = branch(torch.cat([x, x]), torch.cat([no_tokens, tokens]), torch.cat([no_pooled, pooled]))
            without, with_text = both.chunk(2)
        return without + work.guidance * (with_text - without)

    def transition(x: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        v, sigma, dt = velocity(x, sigmas[i]), sigmas[i], sigmas[i + 1] - sigmas[i]
        s = work.level * torch.sqrt(sigma / (1 - (sigmas[1] if i == 0 else sigma)))
        pull = s**2 / (2 * sigma)
        return x * (1 + pull * dt) + v * (1 + pull * (1 - sigma)) * dt, s * torch.sqrt(-dt)

    def log_prob(x_next: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        density = -((x_next - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return density.flatten(1).mean(1)

    with torch.no_grad():
        x = torch.randn(work.samples, *shape)
        path, old = [x], []
        for i in range(work.steps):
            if i < work.trained:
                mean, std = transition(x, i)
                x = mean + std * torch.randn_like(x)
                old.append(log_prob(x, mean, std))
            else:
                x = x + velocity(x, sigmas[i]) * (sigmas[i + 1] - sigmas[i])
            path.append(x)
        rewards = x.flatten(1).mean(1).view(work.prompts, work.group)
        spread = rewards.std(1, keepdim=True, correction=0) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
    for i in range(work.trained):
        mean, std = transition(path[i], i)
        ratio = (log_prob(path[i + 1], mean, std) - old[i]).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - work.clip, 1 + work.clip))
        (losses.mean() / work.trained).backward()
    torch.nn.utils.clip_grad_norm_([p for p in transformer.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return x
