"""Numbers that merge correctly over micro-batches and ranks: a mean carries its weight, an extremum stays one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal

Metrics = dict[str, "Metric"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """One figure and how it merges. `mean(3, 12)` and `mean(12, 4)` of weights 12 and 4 merge by weight, not by halves.

    >>> merge([{"clip": mean(3 / 12, 12)}, {"clip": mean(3 / 4, 4)}])["clip"].value
    0.375
    """

    value: float
    weight: float
    kind: Literal["mean", "sum", "max", "min"]


def mean(value: float, weight: float = 1.0) -> Metric:
    """An average over `weight` elements; weight 0 (an empty micro-batch) has no influence, whatever the value."""
    if weight < 0 or not math.isfinite(weight):
        raise ValueError(f"a weight must be finite and not negative, got {weight}")
    return Metric(value, weight, "mean")


def total(value: float) -> Metric:
    """A count that adds up."""
    return Metric(value, 1.0, "sum")


def maximum(value: float) -> Metric:
    """The largest value seen."""
    return Metric(value, 1.0, "max")


def minimum(value: float) -> Metric:
    """The smallest value seen."""
    return Metric(value, 1.0, "min")


def merge(parts: Iterable[Metrics]) -> Metrics:
    """One dict from many; a name may be missing in some of them."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge_two(name, merged[name], metric) if name in merged else metric
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers; a mean over nothing is NaN."""
    return {name: metric.value if metric.weight > 0 else math.nan for name, metric in metrics.items()}


def _merge_two(name: str, a: Metric, b: Metric) -> Metric:
    if a.kind != b.kind:
        raise ValueError(f"metric {name!r} is reported as {a.kind} and as {b.kind}")
    if a.kind == "sum":
        return total(a.value + b.value)
    if a.kind == "max":
        return maximum(_extremum(max, a.value, b.value))
    if a.kind == "min":
        return minimum(_extremum(min, a.value, b.value))
    weight = a.weight + b.weight
    # A part without weight is left out, not multiplied by zero: its value may be NaN.
    weighted = sum(m.value * m.weight for m in (a, b) if m.weight > 0)
    return mean(weighted / weight if weight else math.nan, weight)


def _extremum(pick: Callable[[float, float], float], a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)
