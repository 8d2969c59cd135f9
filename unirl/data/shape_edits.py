"""Edits that rules can verify: drawn shapes to recolour or reshape. Nothing to download."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import torch

from unirl.data.pictures import Picture
from unirl.data.prompts import PromptRow, PromptSource

_COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "yellow": (0.95, 0.85, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "black": (0.0, 0.0, 0.0),
}
_SHAPES = ("circle", "square", "triangle")
_HELD_OUT = 6  # every sixth row is held out


@dataclasses.dataclass(frozen=True)
class ShapeEdits(PromptSource):
    """90 prompts such as "Make the red circle blue", each with its picture; the metadata names what should be there.

    part: 75 rows to train on, or the 15 others
    side: pixels of a picture
    """

    part: Literal["train", "held_out"] = "train"
    side: int = 256

    def __post_init__(self) -> None:
        if self.part not in ("train", "held_out"):
            raise ValueError(f"part must be train or held_out, got {self.part!r}")
        if self.side < 32:
            raise ValueError(f"a picture has at least 32 pixels a side, got side={self.side}")

    def rows(self) -> tuple[PromptRow, ...]:
        rows = []
        for colour, shape in itertools.product(_COLOURS, _SHAPES):
            pictures = (DrawnShape(colour, shape, self.side),)
            thing = f"the {colour} {shape}"
            for other in sorted(_COLOURS.keys() - {colour}):
                rows.append(PromptRow(f"Make {thing} {other}", {"colour": other, "shape": shape}, pictures))
            for other in (name for name in _SHAPES if name != shape):
                text = f"Turn {thing} into a {other} of the same colour"
                rows.append(PromptRow(text, {"colour": colour, "shape": other}, pictures))
        held_out = self.part == "held_out"
        return tuple(row for number, row in enumerate(rows) if (number % _HELD_OUT == 0) == held_out)


@dataclasses.dataclass(frozen=True)
class DrawnShape(Picture):
    """One flat shape on white, `side` pixels a side."""

    colour: str
    shape: str
    side: int

    def pixels(self) -> torch.Tensor:
        centres = (torch.arange(self.side) + 0.5) / self.side * 2 - 1
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        inside = {
            "circle": x**2 + y**2 <= 0.6**2,
            "square": torch.maximum(x.abs(), y.abs()) <= 0.55,
            "triangle": (x.abs() <= (y + 0.6) / 2) & (y <= 0.6),
        }[self.shape]
        ink = torch.tensor(_COLOURS[self.colour])[:, None, None]
        return (torch.where(inside, ink, torch.ones(3, 1, 1)) * 255).round() / 255
