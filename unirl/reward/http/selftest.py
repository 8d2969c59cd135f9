"""A scorer must order its examples, and say the same twice and alone, before anybody gets a score from it."""

from __future__ import annotations

import itertools
import math

import numpy as np

from unirl.reward.http.config import Example
from unirl.reward.outcome import Outcome
from unirl.reward.scorer import ScorerInput


def inputs(examples: tuple[Example, ...]) -> list[ScorerInput]:
    """The examples as a scorer sees them."""
    return [
        ScorerInput(f"example.{number}", one.prompt, image=_picture(one), text=one.text, metadata=one.metadata)
        for number, one in enumerate(examples)
    ]


def complaint(examples: tuple[Example, ...], runs: list[list[Outcome]], alone: list[Outcome]) -> str | None:
    """What is wrong with a scorer that gave all examples these outcomes, run by run, and each one alone; or None.

    Runs must be equal bit for bit, alone within each example's tolerance, and scores must fall from each to the next.
    """
    scores = [outcome.value for outcome in runs[0]]
    for outcome in [*runs[0], *alone]:
        if outcome.cause:
            return outcome.cause
    for run in runs[1:]:
        again = [outcome.value for outcome in run]
        if again != scores:
            return f"the same examples got {scores}, and then {again}"
    for number, (example, score, lone) in enumerate(zip(examples, scores, alone, strict=True)):
        if not math.isclose(score, lone.value, rel_tol=example.tolerance, abs_tol=example.tolerance):
            return f"example {number} got {score} among the others and {lone.value} alone"
        if example.score is not None and abs(score - example.score) > example.tolerance:
            return f"example {number} must get {example.score} within {example.tolerance:g}, and got {score}"
    if any(better <= worse for better, worse in itertools.pairwise(scores)):
        return f"the examples stand from the best to the worst, and got {scores}"
    return None


def _picture(example: Example) -> np.ndarray | None:
    if example.image is None:
        return None
    from PIL import Image

    with Image.open(example.image) as file:
        picture = np.asarray(file.convert("RGB"))
    picture.setflags(write=False)
    return picture
