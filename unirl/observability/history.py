"""The metrics of a run as series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Points = list[tuple[int, float]]


class History:
    """Lines of `metrics.jsonl`, read by name: `series("train/kl")` is `[(1, 0.0004), (2, 0.0011)]`."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._series: dict[str, Points] = {}
        for line in lines:
            for name, value in line.items():
                if name != "step":
                    self._series.setdefault(name, []).append((line["step"], value))
        self.last_step: int = lines[-1]["step"] if lines else 0

    def __contains__(self, name: object) -> bool:
        return name in self._series

    def names(self, prefix: str = "") -> list[str]:
        """The metrics whose name begins with `prefix`, in the order in which they first came."""
        return [name for name in self._series if name.startswith(prefix)]

    def series(self, name: str) -> Points:
        """`(step, value)` of a metric, non-finite ones included; a name that never came is an empty series."""
        return self._series.get(name, [])

    def finite(self, name: str) -> Points:
        """The series without its NaN and infinities."""
        return [(step, value) for step, value in self.series(name) if math.isfinite(value)]

    def opening(self, name: str) -> float:
        """Mean of the first tenth of the finite values (at least one); NaN where there are none."""
        return mean_of(self.finite(name)[: self.tenth(name)])

    def closing(self, name: str) -> float:
        """Mean of the last tenth of the finite values (at least one); NaN where there are none."""
        return mean_of(self.finite(name)[-self.tenth(name) :])

    def tenth(self, name: str) -> int:
        """How many values `opening` and `closing` average."""
        return max(1, len(self.finite(name)) // 10)


def mean_of(points: Points) -> float:
    """The mean value; NaN of an empty series."""
    return math.fsum(value for _, value in points) / len(points) if points else math.nan
