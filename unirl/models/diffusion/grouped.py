"""Rows that cannot share a forward: one for each group of them, and as many on every rank that gathers the weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from unirl.models.base import Bundle

Forward = Callable[[list[int]], "torch.Tensor"]


def in_groups(bundle: Bundle, layouts: Sequence[Hashable], forward: Forward) -> torch.Tensor:
    """`forward(rows)` once for the rows of each layout, the results in the order of the rows.

    These transformers take the layout of a batch from its first row: only rows alike may share a forward.
    """
    return in_ways(bundle, [(0, layout) for layout in layouts], [forward])


def in_ways(bundle: Bundle, rows: Sequence[tuple[int, Hashable]], forwards: Sequence[Forward]) -> torch.Tensor:
    """`in_groups` where not all rows go through the same modules.

    rows:     for each the number of its forward, and its layout
    forwards: the ways through the model; one may be asked for a row that does not take it
    """
    groups: list[dict[Hashable, list[int]]] = [{} for _ in forwards]
    for row, (way, layout) in enumerate(rows):
        groups[way].setdefault(layout, []).append(row)
    pieces, places = [], list[int]()
    for forward, own, most in zip(forwards, groups, bundle.agreed([len(own) for own in groups]), strict=True):
        spare = next(iter(own.values()), [0])[:1]
        for group in [*own.values(), *[spare] * (most - len(own))]:
            pieces.append(forward(group))
        places += [row for group in own.values() for row in group] + [len(rows)] * (most - len(own))
    # What was done for other ranks sorts behind the rows and is left out: it carries a gradient of exactly 0.
    return torch.cat(pieces)[torch.tensor(places).argsort()[: len(rows)]]
