"""Questions about pictures that rules can verify: how many of the drawn shapes are red circles. Nothing to download."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

import torch

from unirl.data.pictures import Picture
from unirl.data.prompts import PromptRow, PromptSource
from unirl.data.shape_edits import DrawnShape
from unirl.types.seed import derive_seed

_THINGS = tuple((colour, shape) for colour in ("red", "green", "blue") for shape in ("circle", "square", "triangle"))
_SIDES = (2, 3, 4)  # shapes of a picture, across and down
_MOST = 6
_HELD_OUT = 6  # about every sixth row is held out
_SEED = 0  # of the data, which are the same in every run


@dataclasses.dataclass(frozen=True)
class ShapeCounts(PromptSource):
    """Pictures of 4 to 16 shapes, of different sizes, each with a question; the metadata has the answer, 0 to 6.

    part:  `count` rows to train on, or as many others
    cell:  pixels of a shape, a side
    """

    part: Literal["train", "held_out"] = "train"
    count: int = 1000
    cell: int = 64

    def __post_init__(self) -> None:
        if self.part not in ("train", "held_out"):
            raise ValueError(f"part must be train or held_out, got {self.part!r}")
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")
        if self.cell < 8:
            raise ValueError(f"a shape has at least 8 pixels a side, got cell={self.cell}")

    def rows(self) -> tuple[PromptRow, ...]:
        rows = []
        for number in range(self.count):
            draws = random.Random(derive_seed(_SEED, "shape counts", self.part, number))
            row, held_out = _drawn(draws, self.cell)
            while held_out != (self.part == "held_out"):
                row, held_out = _drawn(draws, self.cell)
            rows.append(row)
        return tuple(rows)


def _drawn(draws: random.Random, cell: int) -> tuple[PromptRow, bool]:
    """A row, and whether it is a held out one, which follows from what it shows and asks alone."""
    asked = draws.randrange(len(_THINGS))
    columns, lines = draws.choice(_SIDES), draws.choice(_SIDES)
    cells = columns * lines
    answer = draws.randint(0, min(cells, _MOST))
    others = [number for number in range(len(_THINGS)) if number != asked]
    shown = [asked] * answer + draws.choices(others, k=cells - answer)
    draws.shuffle(shown)
    picture = ShapeGrid(tuple(_THINGS[number] for number in shown), columns, cell)
    question = f"How many {' '.join(_THINGS[asked])}s are in the picture? Think, then end with the number."
    return PromptRow(question, {"answer": answer}, (picture,)), (asked + sum(shown)) % _HELD_OUT == 0


@dataclasses.dataclass(frozen=True)
class ShapeGrid(Picture):
    """Shapes as (colour, shape), line by line, `columns` in each; cell: pixels of one, a side."""

    things: tuple[tuple[str, str], ...]
    columns: int
    cell: int

    def pixels(self) -> torch.Tensor:
        tiles = [DrawnShape(colour, shape, self.cell).pixels() for colour, shape in self.things]
        lines = [torch.cat(tiles[at : at + self.columns], dim=2) for at in range(0, len(tiles), self.columns)]
        return torch.cat(lines, dim=1)
