from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from unirl.data.prompts import as_roots
from unirl.data.shape_edits import DrawnShape, ShapeEdits
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.shapes import ColourShape
from unirl.types.media import to_uint8


@pytest.mark.parametrize(
    ("colour", "shape"),
    list(itertools.product(("red", "yellow", "green", "blue", "black"), ("circle", "square", "triangle"))),
)
def test_what_is_drawn_is_what_the_rule_sees_and_no_other_edit_is_done_yet(colour: str, shape: str) -> None:
    picture = to_uint8(DrawnShape(colour, shape, 64).pixels()[None])[0].numpy()
    targets = {(row.metadata["colour"], row.metadata["shape"]) for row in ShapeEdits().rows()}
    for target in targets | {(colour, shape)}:
        assert strict(picture, *target) == float(target == (colour, shape))


def strict(picture: np.ndarray, colour: str, shape: str) -> float:
    sample = ScorerInput(id="x", prompt="", image=picture, text=None, metadata={"colour": colour, "shape": shape})
    return ColourShape(output="strict").score([sample])[0]


def test_75_rows_train_15_are_held_out_and_each_asks_for_something_else_than_it_shows() -> None:
    train, held_out = ShapeEdits().rows(), ShapeEdits(part="held_out").rows()
    assert (len(train), len(held_out), len({row.prompt for row in (*train, *held_out)})) == (75, 15, 90)
    assert held_out[0].prompt == "Make the red circle black"
    assert held_out[0].metadata == {"colour": "black", "shape": "circle"}


def test_the_pictures_of_a_row_are_its_sources() -> None:
    rows = ShapeEdits(side=32).rows()[:3]
    sources = as_roots(list(rows), 0).media
    assert sources is not None
    assert sources.sources is not None
    assert [len(pictures) for pictures in sources.sources] == [1, 1, 1]
    assert torch.equal(sources.sources[2][0], DrawnShape("red", "circle", 32).pixels())


@pytest.mark.parametrize(("settings", "said"), [({"part": "all"}, "'all'"), ({"side": 16}, "side=16")])
def test_what_cannot_be_drawn_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ShapeEdits(**settings)
