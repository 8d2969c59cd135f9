"""Metrics as series."""

from __future__ import annotations

import math

from unirl.observability.history import History


def test_series_are_read_by_name_and_gaps_are_kept_apart() -> None:
    history = History([{"step": 0, "eval/a": 1.0}, {"step": 1, "b": math.nan}, {"step": 2, "b": 4.0, "eval/a": 2.0}])
    assert history.series("eval/a") == [(0, 1.0), (2, 2.0)]
    assert history.finite("b") == [(2, 4.0)]
    assert len(history.series("b")) == 2
    assert history.series("absent") == []
    assert history.names("eval/") == ["eval/a"]
    assert "b" in history
    assert "c" not in history
    assert history.last_step == 2


def test_opening_and_closing_are_means_of_a_tenth() -> None:
    history = History([{"step": step, "x": float(step)} for step in range(1, 41)])
    assert history.tenth("x") == 4
    assert history.opening("x") == 2.5
    assert history.closing("x") == 38.5
    assert math.isnan(history.opening("y"))


def test_no_lines_are_an_empty_history() -> None:
    assert History([]).last_step == 0
    assert History([]).names() == []
