"""Pictures to count in: the answer is what is drawn, and parts do not overlap."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from unirl.data.shape_counts import ShapeCounts, ShapeGrid
from unirl.data.shape_edits import DrawnShape


def test_the_answer_is_the_number_of_the_asked_shapes_in_the_picture() -> None:
    answers = Counter()
    for row in ShapeCounts(count=300).rows():
        asked = re.fullmatch(
            r"How many (\w+) (\w+)s are in the picture\? Think, then end with the number\.", row.prompt
        )
        [picture] = row.pictures
        assert asked is not None
        assert isinstance(picture, ShapeGrid)
        assert picture.things.count((asked[1], asked[2])) == row.metadata["answer"]
        answers[row.metadata["answer"]] += 1
    assert sorted(answers) == [0, 1, 2, 3, 4, 5, 6]
    assert max(answers.values()) < 90


def test_pictures_are_of_different_sizes_and_hold_what_they_say_line_by_line() -> None:
    sizes = set()
    for row in ShapeCounts(count=60, cell=8).rows():
        [picture] = row.pictures
        assert isinstance(picture, ShapeGrid)
        pixels = picture.pixels()
        lines = len(picture.things) // picture.columns
        assert pixels.shape == (3, 8 * lines, 8 * picture.columns)
        sizes.add((lines, picture.columns))
        tiles = pixels.unflatten(1, (lines, 8)).unflatten(3, (picture.columns, 8)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        for tile, thing in zip(tiles, picture.things, strict=True):
            assert torch.equal(tile, DrawnShape(*thing, side=8).pixels())
    assert len(sizes) == 9


def test_rows_are_the_same_whenever_they_are_asked_for_and_held_out_ones_are_others() -> None:
    train = ShapeCounts(count=200).rows()
    assert train == ShapeCounts(count=200).rows()
    assert train[:50] == ShapeCounts(count=50).rows()
    held_out = {(row.prompt, row.pictures) for row in ShapeCounts(part="held_out", count=200).rows()}
    assert not held_out & {(row.prompt, row.pictures) for row in train}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"part": "test"}, "part must be train or held_out, got 'test'"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"cell": 4}, "at least 8 pixels a side, got cell=4"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ShapeCounts(**settings)  # pyright: ignore[reportArgumentType]
