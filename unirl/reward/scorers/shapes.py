"""Does the picture show "a red circle"? Verified by rules on the pixels: no model, nothing to download."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

import numpy as np

from unirl.reward.scorer import Scorer, ScorerInput

# (extent, circularity, least side ratio): area / bounding box, 4 pi area / perimeter^2, short / long side of the box.
# Circularities are those of `_perimeter`, which takes an upright square for 5 % shorter than it is.
_SHAPES = {
    "circle": (math.pi / 4, 1.0, 0.9),
    "square": (1.0, 0.874, 0.9),
    "triangle": (0.5, 0.61, 0.6),
}
_COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "black", "white", "grey")
_HUE_ENDS = (("red", 15), ("orange", 45), ("yellow", 70), ("green", 165), ("cyan", 195), ("blue", 255), ("purple", 320))
_SYNONYMS = {"gray": "grey", "violet": "purple"}

_INK = 40  # levels by which some channel of a foreground pixel differs from the ground
_SMALLEST = 16  # pixels a side of the picture: below, circle and square have the same outline
_LEAST_AREA = 0.01  # share of the picture
_SOFT = 0.2  # distance from the target shape where the continuous score is 1/2
_TIGHT = 0.15  # the same where the strict score turns 0
_TARGET = re.compile(rf"\b({'|'.join((*_COLOURS, *_SYNONYMS))}) ({'|'.join(_SHAPES)})\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ColourShape(Scorer):
    """Colour and shape of the one thing in the picture against the target; in [0, 1], higher is better.

    Target: `metadata["colour"]` and `metadata["shape"]`, else the "COLOUR SHAPE" in the prompt; a prompt with none, or
    with two different ones, has no score (NaN), and neither has a picture under 16 pixels a side.
    Accepts: a flat circle, upright square (not a diamond) or triangle (with a level or upright side) that stands free
    on an even ground, of 10 pixels at least. The ground is the median of the border pixels. Colours, by ranges of hue,
    saturation and value: red, orange, yellow, green, cyan, blue, purple, pink, black, white, grey.

    continuous: share of the foreground in the target's colour, times 1 / (1 + d^2), where d is the distance of area /
                bounding box and 4 pi area / perimeter^2 from the target's, in units of 0.2
    strict:     1 if the most frequent colour is the target's and its shape is nearest and within 0.15, else 0
    """

    reads = frozenset({"picture"})

    output: Literal["continuous", "strict"] = "continuous"

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: ScorerInput) -> float:
        target, picture = _target(sample), sample.picture
        if target is None or min(picture.shape[:2]) < _SMALLEST:
            return math.nan
        colour, shape = target
        ink = _foreground(picture)
        if ink.mean() < _LEAST_AREA:
            return 0.0
        shares = _colour_shares(picture[ink])
        distances = {name: _distance(ink, *template) for name, template in _SHAPES.items()}
        if self.output == "continuous":
            return shares[colour] / (1 + (distances[shape] / _SOFT) ** 2)
        right_colour = max(shares, key=shares.__getitem__) == colour
        right_shape = min(distances, key=distances.__getitem__) == shape and distances[shape] <= _TIGHT
        return float(right_colour and right_shape)


def _target(sample: ScorerInput) -> tuple[str, str] | None:
    """The (colour, shape) asked for, or None where the prompt does not say which."""
    if {"colour", "shape"} <= set(sample.metadata):
        found = [(sample.metadata["colour"], sample.metadata["shape"])]
    else:
        found = _TARGET.findall(sample.prompt)
    named = {(_SYNONYMS.get(colour.lower(), colour.lower()), shape.lower()) for colour, shape in found}
    if len(named) != 1:
        return None
    colour, shape = named.pop()
    if colour not in _COLOURS or shape not in _SHAPES:
        known = f"colours: {', '.join(_COLOURS)}; shapes: {', '.join(_SHAPES)}"
        raise ValueError(f"{sample.id}: the target {colour!r} {shape!r} is not known ({known})")
    return colour, shape


def _foreground(picture: np.ndarray) -> np.ndarray:
    """`(H, W)` bool: pixels that differ from the ground, the median of the border."""
    border = np.concatenate([picture[0], picture[-1], picture[1:-1, 0], picture[1:-1, -1]])
    return np.abs(picture - np.median(border, axis=0)).max(axis=2) > _INK


def _colour_shares(pixels: np.ndarray) -> dict[str, float]:
    """The share of each colour among `(N, 3)` uint8 pixels."""
    red, green, blue = (pixels / 255).T
    value, lowest = pixels.max(1) / 255, pixels.min(1) / 255
    chroma = value - lowest
    saturation = np.divide(chroma, value, out=np.zeros_like(value), where=value > 0)
    span = np.where(chroma > 0, chroma, 1)
    sextant = np.select(
        [value == red, value == green], [(green - blue) / span % 6, (blue - red) / span + 2], (red - green) / span + 4
    )
    hue = 60 * sextant
    pale_red = ((hue >= 320) | (hue < 15)) & (saturation < 0.5) & (value > 0.7)
    names = np.select(
        [value < 0.2, (saturation < 0.2) & (value > 0.8), saturation < 0.2, pale_red | ((hue >= 320) & (hue < 345))]
        + [hue < end for _, end in _HUE_ENDS],
        ["black", "white", "grey", "pink", *(name for name, _ in _HUE_ENDS)],
        "red",
    )
    return {colour: float(np.mean(names == colour)) for colour in _COLOURS}


def _distance(ink: np.ndarray, extent: float, circularity: float, least_ratio: float) -> float:
    """How far the mask is from a shape: Euclidean over extent, circularity and the lack of side ratio."""
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    area = int(ink.sum())
    ratio = min(height, width) / max(height, width)
    return math.hypot(
        area / (height * width) - extent,
        4 * math.pi * area / _perimeter(ink) ** 2 - circularity,
        max(0.0, least_ratio - ratio),
    )


def _perimeter(ink: np.ndarray) -> float:
    """Length of the outline from its crossings with lines in four directions (Cauchy-Crofton)."""
    padded = np.pad(ink, 1)
    straight = np.sum(padded[1:] != padded[:-1]) + np.sum(padded[:, 1:] != padded[:, :-1])
    diagonal = np.sum(padded[1:, 1:] != padded[:-1, :-1]) + np.sum(padded[1:, :-1] != padded[:-1, 1:])
    return float(math.pi / 8 * (straight + diagonal / math.sqrt(2)))
