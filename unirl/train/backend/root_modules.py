"""The module whose forward surrounds all work with sharded weights; apart, because it loads torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Root(torch.nn.Module):
    """FSDP gathers what no block holds (embeddings, head, critic) around this forward, whoever uses it inside."""

    def __init__(self, transformer: torch.nn.Module, critic: torch.nn.Module | None) -> None:
        super().__init__()
        self.transformer, self.critic = transformer, critic

    def forward(self, work: Callable[[], Result]) -> Result:
        """`work()`: a tensor or a tuple of tensors, through which the backward comes back in."""
        return work()
