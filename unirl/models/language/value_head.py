"""The critic of a language model: one linear layer on what the language head reads."""

from __future__ import annotations

import torch


def value_head(width: int, device: torch.device) -> torch.nn.Module:
    """`(..., D)` float32 to `(..., 1)`. It starts at 0: a drawn one would push the policy by noise at first."""
    head = torch.nn.utils.skip_init(torch.nn.Linear, width, 1, device=device, dtype=torch.float32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head
