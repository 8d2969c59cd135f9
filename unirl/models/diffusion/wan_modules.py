"""The two transformers of Wan 2.2 A14B as one module; apart, because defining an nn.Module loads torch."""

from __future__ import annotations

from typing import Any

import torch


class Experts(torch.nn.Module):
    """transformer: the expert of high noise; transformer_2: that of low noise (their names in diffusers)."""

    def __init__(self, transformer: torch.nn.Module, transformer_2: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2

    def enable_gradient_checkpointing(self) -> None:
        """In both; diffusers' method of the same name."""
        for expert in (self.transformer, self.transformer_2):
            diffusers: Any = expert
            diffusers.enable_gradient_checkpointing()
