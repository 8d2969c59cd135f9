"""Figures merge over micro-batches and ranks as if they had been one batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.metric import Metric, maximum, mean, merge, minimum, total, values


def test_a_mean_merges_by_its_weight() -> None:
    """3 of 12 tokens clipped on one rank and 3 of 4 on the other: 0.375, not the mean of means 0.5."""
    assert values(merge([{"clip": mean(3 / 12, 12)}, {"clip": mean(3 / 4, 4)}])) == {"clip": 0.375}


def test_nine_examples_on_two_ranks_of_which_one_repeats_an_example() -> None:
    """0 .. 8 as five and four: 4.0; the repeated example counts 0, not once more (3.6)."""
    first, second = [0, 1, 2, 3, 4], [5, 6, 7, 8]
    parts = [{"x": mean(sum(own) / len(own), len(own))} for own in (first, second)]
    assert values(merge(parts))["x"] == pytest.approx(4.0)


def test_extrema_are_those_of_all_ranks() -> None:
    parts = [{"high": maximum(1.0), "low": minimum(1.0)}, {"high": maximum(5.0), "low": minimum(-3.0)}]
    assert values(merge(parts)) == {"high": 5.0, "low": -3.0}


def test_counts_add_up() -> None:
    assert values(merge([{"n": total(2)}, {"n": total(3)}, {"n": total(0)}])) == {"n": 5}


def test_a_part_without_weight_has_no_influence_whatever_its_value() -> None:
    """A micro-batch without a valid token, whose mean is 0 / 0."""
    assert values(merge([{"loss": mean(math.nan, 0)}, {"loss": mean(2.0, 3)}])) == {"loss": 2.0}
    assert math.isnan(values(merge([{"loss": mean(math.nan, 0)}, {"loss": mean(0.0, 0)}]))["loss"])
    assert math.isnan(values({"loss": mean(0.0, 0)})["loss"])


def test_a_nan_that_has_weight_is_not_hidden() -> None:
    merged = values(merge([{"a": mean(math.nan, 1), "b": maximum(math.nan)}, {"a": mean(1.0, 9), "b": maximum(2.0)}]))
    assert math.isnan(merged["a"])
    assert math.isnan(merged["b"])
    assert math.isnan(values(merge([{"b": minimum(2.0)}, {"b": minimum(math.nan)}]))["b"])


def test_a_name_may_be_missing_in_some_parts() -> None:
    assert values(merge([{"a": total(1)}, {"b": mean(2.0)}, {}])) == {"a": 1, "b": 2.0}
    assert merge([]) == {}


def test_one_name_has_one_kind() -> None:
    with pytest.raises(ValueError, match="metric 'x' is reported as mean and as sum"):
        merge([{"x": mean(1.0)}, {"x": total(1.0)}])


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(ValueError, match="a weight must be finite and not negative"):
        mean(1.0, weight)


NUMBERS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=12)


@given(numbers=NUMBERS, data=st.data())
def test_any_split_merges_to_the_figures_of_the_whole(numbers: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    pieces = [numbers[start:end] for start, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]
    merged = values(merge(figures(piece) for piece in pieces))
    assert merged["mean"] == pytest.approx(sum(numbers) / len(numbers))
    assert merged["total"] == sum(numbers)
    assert merged["max"] == max(numbers)
    assert merged["min"] == min(numbers)


def figures(piece: list[int]) -> dict[str, Metric]:
    if not piece:
        return {"mean": mean(math.nan, 0)}
    return {
        "mean": mean(sum(piece) / len(piece), len(piece)),
        "total": total(sum(piece)),
        "max": maximum(max(piece)),
        "min": minimum(min(piece)),
    }
