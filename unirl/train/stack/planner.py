"""Batch geometry: which rows form which optimizer step and which micro-batch. Pure functions of numbers."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.sample import Part
from unirl.types.seed import generator


@dataclasses.dataclass(frozen=True)
class Geometry:
    """num_updates_per_batch: optimizer steps on one rollout, on disjoint rows
    micro_batch_size:      rows in one forward; None takes a whole update
    replay_batch:          denoising steps in one forward; None takes all trained steps
    """

    num_updates_per_batch: int = 1
    micro_batch_size: int | None = None
    replay_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_updates_per_batch", "micro_batch_size", "replay_batch"):
            value = self.__dict__[name]
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def check(self, rows: int) -> None:
        """ValueError, with the nearest geometry that works, where `rows` do not divide."""
        updates = self.num_updates_per_batch
        if rows % updates:
            raise ValueError(
                f"{rows} samples a step do not divide into num_updates_per_batch={updates} equal updates; "
                f"the nearest that does is {nearest_divisor(rows, updates)}"
            )
        per_update = rows // updates
        if self.micro_batch_size is not None and per_update % self.micro_batch_size:
            raise ValueError(
                f"an update of {per_update} samples does not divide into micro_batch_size={self.micro_batch_size}; "
                f"the nearest that does is {nearest_divisor(per_update, self.micro_batch_size)}"
            )


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` closest to `wanted`, the smaller one of two."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))


def plan(part: Part, geometry: Geometry, seed: int) -> list[list[Part]]:
    """Micro-batches of each update. Rows are shuffled by (seed, first id), so that updates mix the prompts.

    Rows without a finite reward are left out of their micro-batch; an empty micro-batch is left out of its update.
    """
    assert len(part) % geometry.num_updates_per_batch == 0, (
        f"{len(part)} rows are no {geometry.num_updates_per_batch} equal updates: `check` comes first"
    )
    order = torch.randperm(len(part), generator=generator(seed, "plan", part.ids[0]))
    valid = part.valid[order]
    per_update = len(part) // geometry.num_updates_per_batch
    size = geometry.micro_batch_size or per_update
    updates = []
    for start in range(0, len(part), per_update):
        slices = [slice(at, min(at + size, start + per_update)) for at in range(start, start + per_update, size)]
        kept = [order[rows][valid[rows]] for rows in slices]
        updates.append([part.select(rows) for rows in kept if len(rows)])
    return updates
