from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.unit.reward.samples import entry, service
from unirl.reward.scorers.shapes import ColourShape

COLOURS = {
    "red": (220, 20, 20),
    "orange": (255, 140, 0),
    "yellow": (250, 230, 20),
    "green": (20, 160, 40),
    "cyan": (0, 220, 220),
    "blue": (30, 60, 220),
    "purple": (128, 0, 128),
    "pink": (255, 105, 180),
    "black": (10, 10, 10),
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
}
SHAPES = ("circle", "square", "triangle")


def draw(colour: str, shape: str, side: int = 64, radius: float = 0.3, ground: tuple[int, int, int] | None = None):
    """A filled shape in the middle, drawn at four times the size and scaled down, as a picture has soft edges."""
    if ground is None:
        ground = (90, 60, 60) if colour == "white" else (255, 255, 255)
    big = Image.new("RGB", (4 * side, 4 * side), ground)
    centre, r = 2 * side, 4 * side * radius
    pen = ImageDraw.Draw(big)
    if shape == "circle":
        pen.ellipse([centre - r, centre - r, centre + r, centre + r], fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle([centre - r, centre - r, centre + r, centre + r], fill=COLOURS[colour])
    else:
        h = r * math.sqrt(3) / 2
        pen.polygon([(centre, centre - h), (centre - r, centre + h), (centre + r, centre + h)], fill=COLOURS[colour])
    return np.asarray(big.resize((side, side), Image.Resampling.BOX))


def score(picture, prompt: str = "", output: Literal["continuous", "strict"] = "continuous", **metadata) -> float:
    return ColourShape(output).score([entry(picture, prompt, **metadata)])[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", list(COLOURS))
def test_the_right_picture_scores_high_and_every_other_target_lower(colour, shape):
    picture = draw(colour, shape)
    assert score(picture, f"a {colour} {shape}") > 0.75
    assert score(picture, f"a {colour} {shape}", output="strict") == 1.0
    for other in COLOURS:
        for another in SHAPES:
            if (other, another) != (colour, shape):
                assert score(picture, f"a {other} {another}") < 0.5
                assert score(picture, f"a {other} {another}", output="strict") == 0.0


@pytest.mark.parametrize("side", [16, 32, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_strict_score_holds_at_any_size_of_picture(shape, side):
    assert score(draw("red", shape, side=side, radius=0.4), f"a red {shape}", output="strict") == 1.0


def test_a_perfect_circle_scores_almost_1():
    assert score(draw("blue", "circle", side=256), "a blue circle") > 0.97


def test_prompts_that_are_swapped_score_low_on_both_sides():
    red, blue = draw("red", "circle"), draw("blue", "square")
    right = ColourShape().score([entry(red, "a red circle"), entry(blue, "a blue square")])
    swapped = ColourShape().score([entry(red, "a blue square"), entry(blue, "a red circle")])
    assert min(right) > 0.85
    assert max(swapped) < 0.05


def test_the_continuous_score_rises_as_a_shape_gets_its_colour_and_its_outline():
    half = draw("red", "square").copy()
    half[:, 32:][half[:, 32:].max(axis=2) < 255] = COLOURS["blue"]
    blue, whole = draw("blue", "square"), draw("red", "square")
    scores = [score(picture, "a red square") for picture in (blue, draw("red", "triangle"), half, whole)]
    assert scores == sorted(scores)
    assert scores[2] == pytest.approx(scores[3] / 2, rel=0.1)


def test_two_circles_are_not_a_circle():
    pair = np.concatenate([draw("red", "circle"), draw("red", "circle")], axis=1)
    assert score(pair, "a red circle", output="strict") == 0.0
    assert score(pair, "a red circle") < 0.5


def test_noise_and_an_empty_picture_have_a_real_low_score():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert 0 < score(noise, "a red circle") < 0.05
    assert score(np.full((64, 64, 3), 128, np.uint8), "a red circle") == 0.0


def test_a_grey_picture_can_show_a_grey_circle_and_no_red_one():
    picture = draw("grey", "circle")
    assert score(picture, "a gray circle") > 0.9
    assert score(picture, "a red circle") == 0.0


def test_metadata_comes_before_the_prompt():
    assert score(draw("red", "circle"), "something round", colour="red", shape="circle") > 0.9
    assert score(draw("red", "circle"), "a blue square", colour="red", shape="circle") > 0.9


@pytest.mark.parametrize(
    "prompt",
    ["", "a dog", "a circle", "a red dog", "a red circle and a blue square", "reddish circles", "a red circles"],
)
def test_a_prompt_without_one_target_has_no_score(prompt):
    assert math.isnan(score(draw("red", "circle"), prompt))


@pytest.mark.parametrize("prompt", ["A RED CIRCLE", "a large red circle, on white", "a red circle. A red circle!"])
def test_a_target_is_found_in_a_longer_prompt(prompt):
    assert score(draw("red", "circle"), prompt) > 0.9


def test_a_prompt_without_a_target_costs_only_its_own_sample():
    samples = [entry(draw("red", "circle"), prompt) for prompt in ("a red circle", "a dog", "a red circle")]
    assert [math.isnan(value) for value in ColourShape().score(samples)] == [False, True, False]


@pytest.mark.parametrize("side", [1, 8, 15])
def test_a_tiny_picture_has_no_score(side):
    assert math.isnan(score(np.zeros((side, side, 3), np.uint8), "a red circle"))


def test_an_unknown_target_in_the_metadata_is_an_error_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mauve' 'circle' is not known \(colours: red, .*; shapes: circle"):
        score(draw("red", "circle"), colour="mauve", shape="circle")


def test_the_service_takes_it_as_a_reward():
    assert service(shape=ColourShape()).config.weights == {"shape": 1.0}
