"""Supervised flow matching (arXiv 2210.02747): regress the velocity of the straight path from data to noise."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.algorithms.base import AlgorithmOutput, Needs
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm, DiffusionContext
from unirl.algorithms.losses import flow_matching
from unirl.sde.schedule import shift_sigmas
from unirl.types.sample import Part
from unirl.types.seed import generator
from unirl.types.segment import CleanLatents


@dataclasses.dataclass(frozen=True)
class FlowSFT(DiffusionAlgorithm):
    """`|v(x_t) - (eps - x_0)|^2`, one draw of t and eps per record and step, keyed by the seed and the record's id.

    timesteps: t uniform in (0, 1), or `sigmoid(mean + std z)` (SD3, arXiv 2403.03206, eq. 19)
    shift:     time shift of t towards noise; 1 is none
    """

    seed: int
    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        if not self.shift > 0 or not self.logit_std > 0:
            raise ValueError(f"shift and logit_std must be positive, got {self.shift} and {self.logit_std}")

    @property
    def needs(self) -> Needs:
        return Needs(trajectory=False)

    def columns(self, part: Part) -> int:
        return 1

    def anchors(self, context: DiffusionContext, part: Part, columns: slice) -> Anchors | None:
        return None

    def loss(self, context: DiffusionContext, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        assert isinstance(part.segment, CleanLatents), "SFT trains on given latents"
        stage = context.stage
        x_0 = part.segment.latents
        sigma, noise = self._draws(part.ids, x_0)
        x_t = stage.noised(part.guidance_branches, x_0, noise[:, None], sigma[:, None])
        time = stage.family.time(stage.bundle, sigma, tuple(x_0.shape[1:]))
        velocity = stage.velocity(part.guidance_branches, x_t, sigma=sigma[:, None], time=time[:, None], guidance=1.0)
        weights = part.guidance_branches.positive.weights
        return AlgorithmOutput(flow_matching(velocity[:, 0], x_0, noise, weights)[:, None])

    def _draws(self, ids: list[str], x_0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise levels `(N,)` and noise, the shape of x_0."""
        sources = [generator(self.seed, "sft", sample_id) for sample_id in ids]
        draw = torch.rand if self.timesteps == "uniform" else torch.randn
        numbers = torch.cat([draw(1, generator=source) for source in sources])
        sigma = numbers if self.timesteps == "uniform" else (self.logit_mean + self.logit_std * numbers).sigmoid()
        noise = torch.stack([torch.randn(x_0.shape[1:], generator=source) for source in sources])
        return shift_sigmas(sigma, self.shift).to(x_0.device), noise.to(x_0.device)
