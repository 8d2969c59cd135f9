"""metrics.jsonl: exact round trips, kills, resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.observability.metrics import MetricsLog, read


def test_a_line_has_the_step_first_and_the_names_sorted(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"train/kl": 0.1, "eval/svm": 1 / 3, "reward/mean": 2.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "eval/svm": 0.3333333333333333, "reward/mean": 2.0, "train/kl": 0.1}\n'


@given(st.floats(allow_nan=False))
def test_every_float_reads_back_to_the_same_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("floats") / "metrics.jsonl"
    MetricsLog(path).append(1, {"x": value})
    (line,) = read(path)
    assert line["x"].hex() == value.hex()


def test_nan_and_infinities_are_standard_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(3, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert strict == {"step": 3, "a": None, "b": "Infinity", "c": "-Infinity"}
    (line,) = read(path)
    assert math.isnan(line["a"])
    assert (line["step"], line["b"], line["c"]) == (3, math.inf, -math.inf)


def test_steps_only_go_forward_also_in_a_new_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(5, {"x": 1.0})
    with pytest.raises(ValueError, match="already holds step 5, so step 5 cannot follow"):
        MetricsLog(path).append(5, {"x": 2.0})
    assert [line["x"] for line in read(path)] == [1.0]


def test_the_key_step_cannot_name_a_metric(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'step' is the key of the line itself"):
        MetricsLog(tmp_path / "metrics.jsonl").append(1, {"step": 1.0})


def test_truncate_after_drops_later_lines_and_keeps_the_others_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(6):
        log.append(step, {"x": step / 3})
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    resumed = MetricsLog(path)
    assert resumed.truncate_after(3) == 2
    assert path.read_bytes() == b"".join(kept)
    resumed.append(4, {"x": 4 / 3})
    assert [line["step"] for line in read(path)] == [0, 1, 2, 3, 4]


def test_a_torn_last_line_is_not_read_and_goes_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(1, {"x": 1.0})
    whole = path.read_bytes()
    for cut in (1, 5, 12, len(b'{"step": 2, "x": 2.0}')):
        path.write_bytes(whole + b'{"step": 2, "x": 2.0}'[:cut])
        assert read(path) == [{"step": 1, "x": 1.0}]
        assert MetricsLog(path).truncate_after(2) == 1
        assert path.read_bytes() == whole


def test_nothing_is_appended_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1.0}\n{"ste')
    with pytest.raises(AssertionError, match="truncate_after was not called"):
        MetricsLog(path).append(2, {"x": 2.0})


def test_truncating_everything_leaves_an_empty_log_that_starts_again_at_zero(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.truncate_after(-1) == 0
    log.sync()
    log.append(0, {"x": 1.0})
    assert log.truncate_after(-1) == 1
    log.append(0, {"x": 2.0})
    log.sync()
    assert read(log.path) == [{"step": 0, "x": 2.0}]


@pytest.mark.parametrize("line", ["[]", '"x"', "{", '{"x": 1.0}', '{"step": 1, "x": "high"}', '{"step": "a"}'])
def test_a_broken_line_is_named_by_path_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no line of metrics"):
        read(path)
