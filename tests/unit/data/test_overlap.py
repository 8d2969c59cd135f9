from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unirl.data.overlap import warn_of_overlap
from unirl.data.pictures import PictureFile
from unirl.data.prompts import PromptRow


@pytest.mark.parametrize(
    ("evaluated", "trained", "told"),
    [
        ("ab", "cd", ""),
        ("ab", "ab", ""),
        ("ab", "bbaa", ""),
        ("", "ab", ""),
        ("ab", "bcd", "eval.prompts: 1 of 2 are trained on as well, such as 'B': figures of these are not held out"),
        ("ab", "abc", "eval.prompts: 2 of 2 are trained on as well, such as 'A'"),
        ("abc", "ab", "eval.prompts: 2 of 3 are trained on as well, such as 'A'"),
    ],
)
def test_what_is_shared_is_told_with_its_count_unless_both_are_the_same(
    evaluated: str, trained: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_overlap("eval.prompts", {key: key.upper() for key in evaluated}, list(trained))
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


def test_rows_ask_the_same_where_text_and_pictures_are_equal() -> None:
    picture, other = PictureFile(Path("a.png")), PictureFile(Path("b.png"))
    row = PromptRow("how many?", {"answer": 1}, (picture,))
    assert row.key == PromptRow("how many?", {"answer": 2}, (PictureFile(Path("a.png")),)).key
    assert len({row.key, PromptRow("how many?", {}, (other,)).key, PromptRow("how many?").key}) == 3
