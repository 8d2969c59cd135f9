"""Charts: numbers to pixels."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from unirl.observability.charts import Series, evenly, line_chart, stacked_bars, steps_a_point, ticks

# The inner area of a large chart.
LEFT, RIGHT, TOP, BOTTOM = 52, 568, 12, 232


def elements(svg: str, tag: str, kind: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(svg).iter(tag) if kind in e.attrib["class"].split()]


def vertices(path: str) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in path.strip("MZ").replace("M", "L").split("L")]
    return [(float(x), float(y)) for x, y in pairs]


def hover(svg: str) -> list[dict[str, Any]]:
    return json.loads(ET.fromstring(svg).attrib["data-hover"])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 80, [0, 20, 40, 60, 80]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.11, 0.29, [0.15, 0.2, 0.25]),
        (-0.045, 0.041, [-0.04, -0.02, 0, 0.02, 0.04]),
        (1e-5, 3.1e-5, [1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_points_stand_where_their_numbers_say() -> None:
    svg = line_chart([Series("a", [(0, 0.0), (50, 0.5), (100, 1.0)])], title="t", y_range=(0, 1))
    (line,) = elements(svg, "path", "line")
    assert vertices(line.attrib["d"]) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]
    assert len(elements(svg, "circle", "dot")) == 3
    assert hover(svg)[0]["points"][1] == [310, 122, "50", "0.500"]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    svg = line_chart([Series("a", [(0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf), (4, 1.5)])], title="t")
    (line,) = elements(svg, "path", "line")
    assert line.attrib["d"].count("M") == 3
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_band_is_closed_and_cut_at_the_ends_of_the_axis() -> None:
    series = Series("a", [(0, 0.5), (10, 0.5)], [(0, 0.25, 0.75), (10, -1.0, 2.0)])
    (band,) = elements(line_chart([series], title="t", y_range=(0, 1)), "path", "band")
    height = BOTTOM - TOP
    assert band.attrib["d"].endswith("Z")
    assert vertices(band.attrib["d"]) == [
        (LEFT, BOTTOM - 0.75 * height),
        (RIGHT, TOP),
        (RIGHT, BOTTOM),
        (LEFT, BOTTOM - 0.25 * height),
    ]


def test_many_points_are_drawn_as_means_in_the_band_of_their_range() -> None:
    points = [(step, float(step % 2)) for step in range(1000)]
    assert steps_a_point(points) == 5
    svg = line_chart([Series("a", points)], title="t")
    drawn = hover(svg)[0]["points"]
    assert len(drawn) == 200
    assert {value for _, _, _, value in drawn} == {"0.400", "0.600"}
    (band,) = elements(svg, "path", "band")
    low, high = (y for y in sorted({y for _, y in vertices(band.attrib["d"])}, reverse=True))
    assert low > high


def test_a_single_point_an_even_line_and_nothing_at_all_can_be_drawn() -> None:
    for points in ([(5, 0.25)], [(0, 0.0), (1, 0.0)], [], [(1, math.nan)]):
        ET.fromstring(line_chart([Series("a", points)], title="t", small=True))


def test_held_out_lines_are_dashed_and_labels_are_escaped() -> None:
    svg = line_chart([Series('<b>"&', [(0, 1.0), (1, 2.0)], dashed=True, colour=3)], title='<i>"')
    (line,) = elements(svg, "path", "line")
    assert line.attrib["class"] == "line c3 dashed"
    assert hover(svg)[0]["label"] == '<b>"&'
    assert ET.fromstring(svg).attrib["aria-label"] == '<i>"'


def test_bars_stand_on_each_other_and_add_up() -> None:
    svg = stacked_bars([1, 2], {"rollout": [1.0, 2.0], "train": [3.0, 2.0]}, title="t")
    bars = [{k: float(v) for k, v in e.attrib.items() if k != "class"} for e in elements(svg, "rect", "bar")]
    scale = (BOTTOM - TOP) / (4 * 1.05)
    assert [bar["height"] for bar in bars] == pytest.approx([scale, 2 * scale, 3 * scale, 2 * scale], abs=0.11)
    assert bars[2]["y"] + bars[2]["height"] == pytest.approx(bars[0]["y"], abs=0.11)
    assert bars[0]["y"] + bars[0]["height"] == pytest.approx(BOTTOM, abs=0.11)
    assert [point[3] for point in hover(svg)[1]["points"]] == ["3 s", "2 s"]


def test_bars_of_many_steps_are_averaged() -> None:
    svg = stacked_bars(list(range(1, 97)), {"train": [1.0, 3.0] * 48}, title="t")
    points = hover(svg)[0]["points"]
    assert len(points) == 48
    assert {value for *_, value in points} == {"2 s"}
    assert [step for _, _, step, _ in points[:3]] == ["1", "3", "5"]


def test_evenly_keeps_both_ends() -> None:
    assert evenly([1, 2, 3], 5) == [1, 2, 3]
    assert evenly(range(100), 4) == [0, 33, 66, 99]
