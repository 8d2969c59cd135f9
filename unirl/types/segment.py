"""What a stage records while it generates: enough to replay it."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.batch import Rows, dense, packed, shared


@dataclasses.dataclass(frozen=True, eq=False)
class LatentSegment(Rows):
    """A denoising trajectory of N samples over one schedule of T steps.

    With T = 4 and SDE steps (0, 2) the recorded positions are (0, 1, 2, 3, 4): the two ends of each stochastic step,
    and x_0.

    latents:     `(N, K, *latent)` at the recorded positions, in the storage dtype: exactly what was walked
    positions:   `(K,)` int64, sorted; position i is the latent at `sigmas[i]`
    sigmas:      `(T + 1,)` float32, as the sampler used them
    times:       `(T,)` float32, the model time of each step
    sde_indices: `(S,)` int64, sorted; empty for an ODE rollout
    log_probs:   `(N, S)` float32 of the stochastic steps, averaged over latent elements
    unconditional: `(N, S, *latent)` float32, the unguided velocity at the stochastic steps, where it was asked for
    """

    latents: torch.Tensor = dense()
    positions: torch.Tensor = shared()
    sigmas: torch.Tensor = shared()
    times: torch.Tensor = shared()
    sde_indices: torch.Tensor = shared()
    log_probs: torch.Tensor = dense()
    unconditional: torch.Tensor | None = dense(None)

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        steps = len(self.sigmas) - 1
        if len(self.times) != steps:
            raise ValueError(f"{len(self.sigmas)} sigmas are {steps} steps, got {len(self.times)} model times")
        if self.latents.shape[1] != len(self.positions):
            raise ValueError(f"{self.latents.shape[1]} latents are recorded for {len(self.positions)} positions")
        if self.log_probs.shape[1:] != self.sde_indices.shape:
            raise ValueError(f"log_probs {tuple(self.log_probs.shape)} do not fit {len(self.sde_indices)} SDE steps")
        if self.unconditional is not None and self.unconditional.shape[1] != len(self.sde_indices):
            given = self.unconditional.shape[1]
            raise ValueError(f"{given} unconditional velocities do not fit {len(self.sde_indices)} SDE steps")
        recorded, chosen = self.positions.tolist(), self.sde_indices.tolist()
        if recorded != sorted(set(recorded)) or chosen != sorted(set(chosen)):
            raise ValueError(f"positions {recorded} and SDE steps {chosen} must be sorted and distinct")
        if recorded and not 0 <= recorded[0] <= recorded[-1] <= steps:
            raise ValueError(f"positions {recorded} are outside 0..{steps} of a schedule of {steps} steps")
        if chosen and not 0 <= chosen[0] <= chosen[-1] < steps - 1:
            raise ValueError(f"SDE steps {chosen} are outside 0..{steps - 2} of a schedule of {steps} steps")
        missing = {end for step in chosen for end in (step, step + 1)} - set(recorded)
        if missing:
            raise ValueError(f"SDE steps {chosen} need latents at positions {sorted(missing)}, recorded are {recorded}")

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.times)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The latents at `positions` `(S,)`, which must be recorded: `(N, S, *latent)`."""
        positions = positions.to(self.positions.device)
        column = torch.searchsorted(self.positions, positions)
        if not torch.equal(self.positions[column.clamp(max=len(self.positions) - 1)], positions):
            raise ValueError(f"positions {positions.tolist()} are not all recorded: {self.positions.tolist()}")
        return self.latents[:, column.to(self.latents.device)]

    @property
    def final(self) -> torch.Tensor:
        """x_0 of every sample, `(N, *latent)`."""
        return self.at(torch.tensor([self.num_steps]))[:, 0]


@dataclasses.dataclass(frozen=True, eq=False)
class CleanLatents(Rows):
    """Given x_0 of N samples, for supervised training. latents: `(N, *latent)` float32."""

    latents: torch.Tensor = dense()


@dataclasses.dataclass(frozen=True, eq=False)
class TextSegment(Rows):
    """Responses of N samples, packed end to end.

    Two responses of 3 and 1 tokens: lengths (3, 1), tokens (4,); token 3 is the whole second response.

    tokens:     `(sum L,)` int64, as the sampler produced them (text is never tokenised again)
    log_probs:  `(sum L,)` float32, of the distribution that was sampled; 0 where the tokens are given
    loss_mask:  `(sum L,)` bool, True where a token is trained
    lengths:    `(N,)` int64
    truncated:  `(N,)` bool, True where the response was cut off by max_new_tokens

    Where tokens were drawn from a part of the vocabulary (top-p, top-k):
    support:       `(sum S,)` int64, the tokens that each one was drawn from, end to end
    support_sizes: `(sum L,)` int64, how many these are; support_total: `(N,)`, their sum in each row

    Where a critic is used:
    values, returns, advantages: `(sum L,)` float32
    """

    tokens: torch.Tensor = packed("lengths")
    log_probs: torch.Tensor = packed("lengths")
    loss_mask: torch.Tensor = packed("lengths")
    lengths: torch.Tensor = dense()
    truncated: torch.Tensor = dense()
    support: torch.Tensor | None = packed("support_total", None)
    support_sizes: torch.Tensor | None = packed("lengths", None)
    support_total: torch.Tensor | None = dense(None)
    values: torch.Tensor | None = packed("lengths", None)
    returns: torch.Tensor | None = packed("lengths", None)
    advantages: torch.Tensor | None = packed("lengths", None)
