"""Batch geometry: which rows form which optimizer step and which micro-batch. Pure functions of numbers."""

from __future__ import annotations

import dataclasses

import torch

from unirl.types.batch import Rows, dense, nested, shared
from unirl.types.condition import PromptTokens
from unirl.types.sample import Part
from unirl.types.sample_id import sibling_id
from unirl.types.seed import generator
from unirl.types.segment import TextSegment

_BEYOND = 2**30  # no group has as many siblings


@dataclasses.dataclass(frozen=True)
class Geometry:
    """num_updates_per_batch: optimizer steps on one rollout, on disjoint rows
    micro_batch_size:      rows in one forward; None takes a whole update
    """

    num_updates_per_batch: int = 1
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
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

    def cut(self, part: Part, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows of one update as those of its micro-batches."""
        return list(rows.split(self.micro_batch_size or len(rows)))


@dataclasses.dataclass(frozen=True)
class DiffusionGeometry(Geometry):
    """replay_batch: denoising steps in one forward; None takes all trained steps"""

    replay_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class TokenGeometry(Geometry):
    """token_budget: tokens in one forward, instead of rows; a longer row goes alone. Siblings share their prompt."""

    token_budget: int | None = None

    def __post_init__(self) -> None:
        Geometry.__post_init__(self)
        if self.token_budget is not None and self.micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} and token_budget={self.token_budget} both say how large a "
                "micro-batch is: leave one of them null"
            )

    def cut(self, part: Part, rows: torch.Tensor) -> list[torch.Tensor]:
        """Siblings next to each other, so that a forward reads their prompt once."""
        assert isinstance(part.segment, TextSegment), "a token budget counts the tokens of responses"
        assert isinstance(part.conditions, PromptTokens), "a token budget counts the tokens of prompts"
        prompts, responses = part.conditions.lengths.tolist(), part.segment.lengths.tolist()
        parents = part.prompt_ids
        first = {parent: place for place, parent in reversed(list(enumerate(parents[row] for row in rows.tolist())))}
        order = sorted(rows.tolist(), key=lambda row: first[parents[row]])
        if self.token_budget is None:
            return Geometry.cut(self, part, torch.tensor(order, dtype=torch.long))
        micros: list[list[int]] = []
        used = 0
        for row in order:
            with_sibling = bool(micros) and parents[row] == parents[micros[-1][-1]]
            alone = prompts[row] + responses[row]
            added = responses[row] if with_sibling else alone
            if micros and used + added <= self.token_budget:
                micros[-1].append(row)
                used += added
            else:
                micros.append([row])
                used = alone
        return [torch.tensor(micro, dtype=torch.long) for micro in micros]


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` closest to `wanted`, the smaller one of two."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), d))


@dataclasses.dataclass(frozen=True, eq=False)
class Batch(Rows):
    """Rows of a rollout with their place in its shuffled order, which cuts it into updates.

    It is made where the whole rollout is known: whatever ranks the rows go to, each of them is in the same update.

    part:   `(N,)` rows
    places: `(N,)`, 0 .. count - 1; -1 for a row that no update has: it keeps a rank company that would have none
    count:  rows of the whole rollout
    """

    part: Part = nested()
    places: torch.Tensor = dense()
    count: torch.Tensor = shared()

    @classmethod
    def of(cls, part: Part, seed: int, ranks: int) -> Batch:
        """All rows of `part`, shuffled by (seed, first id) so that updates mix the prompts; at least one for a rank."""
        count = len(part)
        order = torch.randperm(count, generator=generator(seed, "plan", part.ids[0]))
        places = torch.empty_like(order)
        places[order] = torch.arange(count)
        if ranks > count:
            first = part.select([0])
            names = [sibling_id(first.ids[0], _BEYOND + number) for number in range(ranks - count)]
            idle = [dataclasses.replace(first, ids=[name]) for name in names]
            part = Part.concat([part, *idle])
            places = torch.cat([places, torch.full((len(idle),), -1)])
        return cls(part=part, places=places, count=torch.tensor(count))


def plan(batch: Batch, geometry: Geometry) -> list[list[Part]]:
    """Micro-batches of each update; those of a rank where `batch` is its share of the rows.

    Rows without a finite reward are left out of their micro-batch; an empty micro-batch is left out of its update.
    """
    part, count, updates = batch.part, int(batch.count), geometry.num_updates_per_batch
    assert count % updates == 0, f"{count} rows are no {updates} equal updates: `check` comes first"
    places, rows = batch.places.sort()
    rows, places = rows[places >= 0], places[places >= 0]
    valid, found = part.valid, []
    for update in range(updates):
        own = rows[places // (count // updates) == update]
        kept = [micro[valid[micro]] for micro in geometry.cut(part, own)] if len(own) else []
        found.append([part.select(micro) for micro in kept if len(micro)])
    return found
