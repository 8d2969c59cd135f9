"""Questions with one-word answers."""

from __future__ import annotations

import pytest

from unirl.data.short_answers import ShortAnswers


def test_no_question_is_both_trained_and_held_out() -> None:
    train, held_out = ShortAnswers().rows(), ShortAnswers("held_out").rows()
    assert (len(train), len(held_out)) == (93, 31)
    assert len({row.prompt for row in (*train, *held_out)}) == 124
    assert held_out[0].prompt == "What is the capital of France? Answer with one word."
    assert held_out[0].metadata == {"answer": "Paris"}


def test_both_parts_ask_every_kind_of_question() -> None:
    kinds = [{row.prompt.split()[3] for row in ShortAnswers(part).rows()} for part in ("train", "held_out")]
    assert kinds[0] >= {"capital", "opposite", "plural", "past"}
    assert kinds[1] >= {"capital", "opposite", "plural", "past"}


def test_every_answer_is_one_word() -> None:
    answers = [row.metadata["answer"] for part in ("train", "held_out") for row in ShortAnswers(part).rows()]
    assert all(answer.isalpha() for answer in answers)


def test_another_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train or held_out, got 'test'"):
        ShortAnswers("test")  # type: ignore[arg-type]
