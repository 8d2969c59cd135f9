from __future__ import annotations

import math
import statistics

import pytest

from unirl.observability.skills import Tally, table, tally


def test_the_mean_counts_samples_and_what_is_invalid_stands_apart() -> None:
    line = tally("f", "s", [0.5, 1.0, math.nan, 0.0, math.nan], [0, 0, 0, 1, 1])
    assert (line.mean, line.n, line.invalid) == (0.5, 3, 2)


def test_with_one_sample_a_prompt_the_error_is_that_of_independent_values() -> None:
    values = [0.1, 0.7, 0.4, 0.9]
    line = tally("f", "s", values, [0, 1, 2, 3])
    assert line.error == pytest.approx(statistics.stdev(values) / 2, rel=1e-12)


def test_with_equally_many_samples_it_is_that_of_the_means_of_the_prompts() -> None:
    values, prompts = [0.0, 0.2, 0.5, 0.7, 1.0, 0.4], [0, 0, 1, 1, 2, 2]
    assert tally("f", "s", values, prompts).error == pytest.approx(
        statistics.stdev([0.1, 0.6, 0.7]) / 3**0.5, rel=1e-12
    )


def test_copies_of_a_sample_make_no_mean_surer() -> None:
    once, four = tally("f", "s", [0, 1, 0], [0, 1, 2]), tally("f", "s", [0, 1, 0] * 4, [0, 1, 2] * 4)
    assert four.error == pytest.approx(once.error, rel=1e-12)
    assert four.n == 12


def test_with_unequal_numbers_of_samples_it_is_the_sandwich_by_hand() -> None:
    # mean 1/2; apart, summed by prompt: 0.5 + 0.5, -0.5, -0.5; 3 / 2 * (1 + 0.25 + 0.25) / 4^2
    line = tally("f", "s", [1, 1, 0, 0], [0, 0, 1, 2])
    assert line.error == pytest.approx(math.sqrt(2.25) / 4, rel=1e-12)


def test_a_single_prompt_has_no_error_and_no_valid_value_no_mean() -> None:
    assert math.isnan(tally("f", "s", [0.0, 1.0], [3, 3]).error)
    nothing = tally("f", "s", [math.nan, math.nan], [0, 1])
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.error)
    assert (nothing.n, nothing.invalid) == (0, 2)


def test_the_table_names_a_figure_once() -> None:
    lines = [Tally("ocr", "text", 0.25, 0.0625, 8, 1), Tally("ocr", "all", 0.5, math.nan, 12, 0)]
    assert table(lines) == (
        "figure  skill   mean  std error   n  invalid\n"
        "ocr     text   0.250     0.0625   8        1\n"
        "        all    0.500             12        0"
    )
