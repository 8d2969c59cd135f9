"""AdamW and its learning-rate schedule as a pure function of the optimizer step."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW. schedule: after `warmup_steps` constant, or falling to `lr * final_ratio` at the run's end."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {list(self.betas)}")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio is a share of lr in [0, 1], got {self.final_ratio}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")

    def lr_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0 of `total_steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup_steps) / max(total_steps - self.warmup_steps, 1), 1.0)
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.final_ratio + (1 - self.final_ratio) * left)
