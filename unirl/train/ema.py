"""Other weights of a policy, swapped in for a while: the EMA and the frozen reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch

from unirl.train.dtensor import local


@dataclasses.dataclass(frozen=True)
class EMA:
    """Exponential moving average of the trainable weights: `shadow = d shadow + (1 - d) live`.

    decay:   the largest d
    warmup:  how d grows with the number t of updates done before
             constant   d = decay
             inverse    d = min(decay, (1 + t) / (warmup_steps + t))         (diffusers with warmup_steps 10)
             linear     d = min(decay, max(slope (t - warmup_steps), 0))     (DiffusionNFT's "old" policy)
    unit:    one update per optimizer step, or per rollout
    """

    decay: float = 0.9999
    warmup: Literal["constant", "inverse", "linear"] = "inverse"
    warmup_steps: int = 10
    slope: float = 0.001
    unit: Literal["optimizer_step", "rollout"] = "optimizer_step"

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")
        if self.warmup_steps < 0 or (self.warmup == "inverse" and self.warmup_steps < 1):
            raise ValueError(f"warmup_steps must not be negative (at least 1 for inverse), got {self.warmup_steps}")

    def decay_at(self, updates: int) -> float:
        """d of the update that comes after `updates` earlier ones."""
        if self.warmup == "inverse":
            return min(self.decay, (1 + updates) / (self.warmup_steps + updates))
        if self.warmup == "linear":
            return min(self.decay, max(self.slope * (updates - self.warmup_steps), 0.0))
        return self.decay


class Shadow:
    """A second set of values for some parameters, kept in the parameters' own dtype (float32 masters).

    `applied()` exchanges storage pointers: nothing is copied, `requires_grad` and the optimizer's parameters stay what
    they are, and a graph that was built before still sees its own weights at backward, since they are back by then.
    Shards are exchanged by value: FSDP gathers from the storage that it knows.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The shadow's values in place of the live ones; the live ones return whatever happens inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def update(self, decay: float) -> None:
        """Move towards the live weights: `lerp` in float32."""
        for name, parameter in self._parameters.items():
            local(self.values[name]).lerp_(local(parameter.detach()), 1 - decay)

    def _swap(self) -> None:
        from torch.distributed.tensor import DTensor

        for name, parameter in self._parameters.items():
            own, other = local(parameter.detach()), local(self.values[name])
            if isinstance(parameter, DTensor):
                live = own.clone()
                own.copy_(other)
                other.copy_(live)
            else:
                parameter.data, self.values[name] = self.values[name], parameter.data
