from __future__ import annotations

import re

import pytest

from unirl.data.expressions import Expressions
from unirl.reward.scorers.arithmetic import evaluate


def test_an_answer_is_the_value_of_the_expression_in_its_prompt() -> None:
    for row in Expressions(number=200).rows():
        [expression] = re.findall(r"What is (.*)\?", row.prompt)
        assert evaluate(expression) == row.metadata["answer"]


def test_prompts_are_all_different_and_no_first_number_of_the_held_out_ones_is_trained() -> None:
    train, held_out = (
        [row.prompt for row in source.rows()] for source in (Expressions("train"), Expressions("held_out"))
    )
    assert len(set(train)) == len(set(held_out)) == 2000
    first = [{re.findall(r"\d+", prompt)[0] for prompt in prompts} for prompts in (train, held_out)]
    assert len(first[0]) == 72
    assert len(first[1]) == 18
    assert not first[0] & first[1]


def test_a_number_of_prompts_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="number must be 1 to 10000, got 10001"):
        Expressions(number=10_001)
