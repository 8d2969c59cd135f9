"""Noise of a rollout, keyed by sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.types.sample_id import parent_id
from unirl.types.seed import generator


def initial_noise(ids: Sequence[str], shape: Sequence[int], seed: int, *, same_in_group: bool = False) -> torch.Tensor:
    """x_T `(N, *shape)` float32 on the CPU, keyed by (seed, sample id), or by the group's id.

    A sample id carries its rollout number, so the next rollout draws anew.
    """
    keys = [parent_id(sample_id) for sample_id in ids] if same_in_group else ids
    return torch.stack([torch.randn(tuple(shape), generator=generator(seed, "x_T", key)) for key in keys])


class StepNoise:
    """Noise of the stochastic steps: one generator per sample, drawn in step order on the CPU.

    An engine that takes one generator per request, seeded with `derive_seed(seed, "steps", sample_id)`, draws the same.
    """

    def __init__(self, ids: Sequence[str], seed: int) -> None:
        self._generators = [generator(seed, "steps", sample_id) for sample_id in ids]

    def draw(self, shape: Sequence[int]) -> torch.Tensor:
        """The next `(N, *shape)` float32 standard normal numbers."""
        return torch.stack([torch.randn(tuple(shape), generator=g) for g in self._generators])
