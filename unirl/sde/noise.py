"""Keyed noise: every draw belongs to a key, so it does not depend on batch splitting, order or worker count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from unirl.types.sample_id import parent_id


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed of a key; distinct keys give distinct seeds (up to a hash collision). Each part keeps its type."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator of its own for `key`."""
    return torch.Generator("cpu").manual_seed(derive_seed(*key))


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
