"""The table of a suite: for each figure and skill a mean, its standard error, and how many could not be scored."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

from unirl.observability.formatting import figure as written


@dataclasses.dataclass(frozen=True)
class Tally:
    """A line of the table.

    mean:    of `n` values; NaN where there is none
    error:   the standard error of the mean; NaN where the values are of fewer than two prompts
    invalid: values that are none, which count in nothing else
    """

    figure: str
    skill: str
    mean: float
    error: float
    n: int
    invalid: int


def tally(figure: str, skill: str, values: Sequence[float], prompts: Sequence[int]) -> Tally:
    """One line. values: NaN is invalid; prompts: the number of the prompt of each, since those of one hang together.

    With P prompts and n values, error^2 = P / (P - 1) * sum over prompts of (sum of x - mean)^2 / n^2: where prompts
    have equally many values, the standard deviation of the prompts' means over the root of P.

    `tally("f", "s", [0, 0, 1, 1], [0, 0, 1, 1])` has mean 0.5 and error 0.5.
    """
    valid = [(value, prompt) for value, prompt in zip(values, prompts, strict=True) if math.isfinite(value)]
    invalid, n = len(values) - len(valid), len(valid)
    if not valid:
        return Tally(figure, skill, math.nan, math.nan, 0, invalid)
    mean = statistics.fmean(value for value, _ in valid)
    apart: dict[int, list[float]] = collections.defaultdict(list)
    for value, prompt in valid:
        apart[prompt].append(value - mean)
    count = len(apart)
    error = math.nan
    if count > 1:
        error = math.sqrt(count / (count - 1) * math.fsum(math.fsum(own) ** 2 for own in apart.values())) / n
    return Tally(figure, skill, mean, error, n, invalid)


def table(tallies: Sequence[Tally]) -> str:
    """The lines below each other, the name of a figure once."""
    rows = [("figure", "skill", "mean", "std error", "n", "invalid")]
    for before, one in zip([None, *tallies], tallies, strict=False):
        name = "" if before is not None and before.figure == one.figure else one.figure
        error = "" if math.isnan(one.error) else written(one.error)
        rows.append((name, one.skill, written(one.mean), error, str(one.n), str(one.invalid)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
