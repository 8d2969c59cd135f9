from __future__ import annotations

import pytest

from tests.unit.reward.samples import one
from unirl.reward.scorers.multiple_choice import MultipleChoice

LONG = "word " * 200_000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (b). ", "B"),
        ("**B**", "B"),
        ("\\boxed{B}", "B"),
        ("$\\boxed{\\text{b}}$", "B"),
        ("Ⓑ", "B"),
        ("（Ｂ）", "B"),  # noqa: RUF001 - full-width, as Chinese and Japanese models write
        ("The answer is B", "B"),
        ("the answer is: b", "B"),
        ("Answer: b.", "B"),
        ("I think it is B, because C++ is no language of 1960", "B"),
        ("B. Paris", "B"),
        ("b) Paris", "B"),
        ("答案是 B。", "B"),
        ("A is right", "A"),
        ("A dog can bark, so (B)", "B"),
        ("It is A.", "A"),
        ("A", "A"),
        ("I'd say D", "D"),
        ("A-level students say D.", "D"),
        ("Both A and B", "AB"),
        ("(A) is wrong, so the answer is (B)", "AB"),
        ("A, B, C or D", "ABCD"),
        ("A-B-C-D", "ABCD"),
        ("B-C", "BC"),
        ("A+B", "AB"),
        ("A nor B", "AB"),
        ("A vs B", "AB"),
        ("A vs. B", "AB"),
        ("Neither A nor B", "AB"),
        ("Choice A works", "A"),
        ("Answer A fits best", "A"),
        ("the answer is A as shown", "A"),
        ("Choice B works", "B"),
        ("A works", "A"),
        ("A dog", ""),
        ("It barks. A dog does.", ""),
        ("- A dog\n- A cat", ""),
        ("A+ for C++ and C#", ""),
        ("Á", ""),
        ("E", ""),
        ("a dog", ""),
        ("The answer is a dog", ""),
        ("Bob", ""),
        ("B2", ""),
        ("", ""),
        (LONG, ""),
        ("answer" + " " * 100_000 + "x", ""),
    ],
    ids=lambda value: value[:30],
)
def test_letters_that_a_free_answer_names(text, named):
    assert MultipleChoice().named(text) == set(named)


def test_two_letters_score_0_whichever_is_right_unless_the_answer_is_cut_out():
    text = "A is wrong.</think> So it is B."
    assert [one(MultipleChoice(), text, answer=letter) for letter in "AB"] == [0, 0]
    cut = MultipleChoice(extract="(?s)</think>(.*)")
    assert [one(cut, text, answer=letter) for letter in "AbB"] == [0, 1, 1]
    assert one(cut, "B", answer="B") == 0


@pytest.mark.parametrize("answer", ["E", "AB", "", 1, None])
def test_the_answer_is_one_of_the_letters(answer):
    with pytest.raises(ValueError, match="must be one letter of ABCD"):
        one(MultipleChoice(), "A", answer=answer)


def test_more_choices_have_more_letters():
    assert one(MultipleChoice(choices=10), "J", answer="J") == 1
    assert one(MultipleChoice(choices=10), "I am sure: (J)", answer="J") == 1
    with pytest.raises(ValueError, match=r"choices is in 2\.\.26, got 27"):
        MultipleChoice(choices=27)
