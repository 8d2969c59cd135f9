"""Line charts and stacked bars as plain inline SVG.

No colour is written here: elements carry classes (`c0` .. `c7` for a series, `grid`, `tick`) that the page's style
sheet fills in for light and dark. `data-hover` holds what the page's script shows under the pointer.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from typing import TypeVar

from unirl.observability.formatting import figure
from unirl.observability.history import Points

T = TypeVar("T")
Band = list[tuple[int, float, float]]

COLOURS = 8
# Width and height in the page's pixels: text keeps its size where a chart has the room it was made for.
_LARGE, _SMALL = (580, 260), (340, 180)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
# More points than this are drawn as means of neighbours, with a band from the least to the largest of them.
_MOST_POINTS = 200
_MOST_BARS = 48
# A series of few points (evaluations) shows each as a dot.
_DOTTED = 40


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    points: (step, value); a non-finite value leaves a gap
    band:   (step, lower, upper) of a region around the line
    dashed: for what is held out
    colour: 0 .. COLOURS - 1
    """

    label: str
    points: Points
    band: Band | None = None
    dashed: bool = False
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Data to pixels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    size: tuple[int, int] = _LARGE

    @property
    def right(self) -> int:
        return self.size[0] - _RIGHT

    @property
    def bottom(self) -> int:
        return self.size[1] - _BOTTOM

    def x(self, step: float) -> float:
        low, high = self.x_range
        return _LEFT + (step - low) / (high - low or 1) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - _TOP)

    def path(self, points: Points) -> str:
        """Path data through the points, broken where a value is not finite."""
        pieces, pen = [], "M"
        for step, value in points:
            if math.isfinite(value):
                pieces.append(f"{pen}{self.x(step):.1f},{self.y(value):.1f}")
                pen = "L"
            else:
                pen = "M"
        return "".join(pieces)

    def area(self, band: Band) -> str:
        """Path data of the region between the band's edges, cut at the ends of the axis."""
        low, high = self.y_range
        upper = self.path([(step, min(top, high)) for step, _, top in band])
        lower = self.path([(step, max(bottom, low)) for step, bottom, _ in reversed(band)])
        return f"{upper}L{lower[1:]}Z"


def line_chart(
    series: Sequence[Series], *, title: str, y_range: tuple[float, float | None] | None = None, small: bool = False
) -> str:
    """An SVG of the series over the steps. y_range: the ends of the axis, where the data shall not choose them."""
    drawn = [_condense(one) for one in series]
    scale = _scale(drawn, y_range, _SMALL if small else _LARGE)
    parts = _axes(scale)
    for one in drawn:
        if one.band:
            parts.append(f'<path class="band c{one.colour}" d="{scale.area(one.band)}"/>')
    for one in drawn:
        dashed = " dashed" if one.dashed else ""
        parts.append(f'<path class="line c{one.colour}{dashed}" d="{scale.path(one.points)}"/>')
        if len(one.points) <= _DOTTED:
            parts += [
                f'<circle class="dot c{one.colour}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="3"/>'
                for step, value in one.points
                if math.isfinite(value)
            ]
    hover = [
        {
            "label": one.label,
            "colour": one.colour,
            "points": [
                [round(scale.x(step), 1), round(scale.y(value), 1), f"{step:,.0f}", figure(value)]
                for step, value in one.points
                if math.isfinite(value)
            ],
        }
        for one in drawn
    ]
    return _svg(parts, scale.size, title, hover)


def stacked_bars(steps: Sequence[int], shares: dict[str, list[float]], *, title: str) -> str:
    """An SVG of one bar a step, its parts on top of each other; more steps than fit are averaged. Values in seconds."""
    size = math.ceil(len(steps) / _MOST_BARS)
    starts = range(0, len(steps), size)
    bars = {name: [_mean(values[start : start + size]) for start in starts] for name, values in shares.items()}
    tallest = max(sum(column) for column in zip(*bars.values(), strict=True))
    scale = _Scale((-0.5, len(starts) - 0.5), (0, tallest * 1.05 or 1))
    step_ticks = [(i, steps[starts[i]]) for i in evenly(range(len(starts)), 6)]
    parts = _axes(scale, step_ticks)
    width = max(1.0, (scale.x(1) - scale.x(0)) * 0.82)
    base = [0.0] * len(starts)
    for colour, values in enumerate(bars.values()):
        for i, value in enumerate(values):
            top, bottom = scale.y(base[i] + value), scale.y(base[i])
            box = f'x="{scale.x(i) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="bar c{colour % COLOURS}" {box}/>')
            base[i] += value
    hover = [
        {
            "label": name,
            "colour": colour % COLOURS,
            "points": [
                [round(scale.x(i), 1), None, f"{steps[starts[i]]:,}", f"{figure(value)} s"]
                for i, value in enumerate(values)
            ],
        }
        for colour, (name, values) in enumerate(bars.items())
    ]
    return _svg(parts, scale.size, title, hover)


def steps_a_point(points: Points) -> int:
    """How many neighbours a drawn point averages."""
    return max(1, math.ceil(len(points) / _MOST_POINTS))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers in [low, high], about `count` of them: `ticks(0, 80)` is `[0, 20, 40, 60, 80]`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    # The factor nearest to what is asked, on a logarithmic scale.
    step = power * next(
        factor for factor, least in ((10, 50**0.5), (5, 10**0.5), (2, 2**0.5), (1, 0)) if rough / power >= least
    )
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Up to `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _scale(series: Sequence[Series], y_range: tuple[float, float | None] | None, size: tuple[int, int]) -> _Scale:
    steps = [step for one in series for step, _ in one.points]
    values = [value for one in series for _, value in one.points if math.isfinite(value)]
    values += [edge for one in series for _, *edges in one.band or [] for edge in edges]
    x_range = (min(steps), max(steps)) if steps else (0, 1)
    low, high = (min(values), max(values)) if values else (0, 1)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1
    # A figure that cannot be negative gets no axis below zero.
    ends = (max(low - room, 0) if low >= 0 else low - room, high + room)
    if y_range is not None:
        ends = (y_range[0], ends[1] if y_range[1] is None else y_range[1])
    return _Scale(x_range, ends, size)


def _condense(series: Series) -> Series:
    """The same line in few enough points. Bands keep their finite edges only."""
    band = [edges for edges in series.band or [] if all(map(math.isfinite, edges))]
    size = steps_a_point(series.points)
    if size == 1:
        return dataclasses.replace(series, band=band)
    points: Points = []
    ranges: Band = []
    for start in range(0, len(series.points), size):
        group = series.points[start : start + size]
        step, values = group[len(group) // 2][0], [value for _, value in group if math.isfinite(value)]
        points.append((step, _mean(values) if values else math.nan))
        if values:
            ranges.append((step, min(values), max(values)))
    return dataclasses.replace(series, points=points, band=band[::size] or ranges)


def _axes(scale: _Scale, x_ticks: Sequence[tuple[float, int]] | None = None) -> list[str]:
    right, bottom = scale.right, scale.bottom
    parts = []
    x_count, y_count = (6, 5) if scale.size == _LARGE else (4, 4)
    for value in ticks(*scale.y_range, y_count):
        y, label = scale.y(value), f"{value:g}".replace("e-0", "e-")
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    low, high = scale.x_range
    if x_ticks is None:
        whole = ticks(low, high, x_count) if high > low else [low]
        x_ticks = [(step, int(step)) for step in whole if step == int(step)]
    for number, (place, step) in enumerate(x_ticks):
        anchor = "end" if scale.x(place) > right - 14 else "middle"
        label = f"{step:,}" if number else f"step {step:,}"
        parts.append(
            f'<text class="tick under" x="{scale.x(place):.1f}" y="{bottom + 8}" text-anchor="{anchor}">{label}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _svg(parts: Sequence[str], size: tuple[int, int], title: str, hover: object) -> str:
    data = html.escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")), quote=True)
    label = html.escape(title, quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{label}" data-hover="{data}">'
        f"{''.join(parts)}</svg>"
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
