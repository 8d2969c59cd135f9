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

    def forward(self, high: torch.Tensor, **inputs: torch.Tensor | None) -> torch.Tensor:
        """Velocity of a batch, each row by the expert that `high` `(B,)` bool names; one forward an expert in use.

        inputs: tensors `(B, ...)` under the names of the transformer's arguments
        """
        rows_of, pieces = [], []
        for expert, chosen in ((self.transformer, high), (self.transformer_2, ~high)):
            rows = chosen.nonzero().flatten()
            if len(rows):
                own = {name: None if value is None else value[rows] for name, value in inputs.items()}
                rows_of.append(rows)
                pieces.append(expert(**own, return_dict=False)[0])
        return torch.cat(pieces)[torch.cat(rows_of).argsort()]

    def enable_gradient_checkpointing(self) -> None:
        """In both; diffusers' method of the same name."""
        for expert in (self.transformer, self.transformer_2):
            diffusers: Any = expert
            diffusers.enable_gradient_checkpointing()
