"""Closed values of the scorers that read a text by rules."""

from __future__ import annotations

import math

import pytest

from tests.unit.reward.samples import one, wrote
from unirl.reward.scorers.arithmetic import Arithmetic
from unirl.reward.scorers.exact_match import ExactMatch
from unirl.reward.scorers.json_valid import JsonValid
from unirl.reward.scorers.length import Length
from unirl.reward.scorers.multiple_choice import MultipleChoice
from unirl.reward.scorers.pattern import Pattern

LONG = "word " * 200_000


# --- exact match ---


@pytest.mark.parametrize(
    ("settings", "text", "answer", "score"),
    [
        ({}, "Paris", "Paris", 1),
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({}, "Paris.", "Paris", 0),
        ({}, "", "Paris", 0),
        ({}, "Cafe\u0301", "Café", 1),
        ({}, "42", 42, 1),
        ({}, "b", ["a", "b"], 1),
        ({}, "c", ["a", "b"], 0),
        ({"strip": False}, " Paris", "Paris", 0),
        ({"casefold": True}, "STRASSE", "Straße", 1),
        ({"casefold": True}, "paris", "PARIS", 1),
        ({"whitespace": "collapse"}, "New\n  York", "New York", 1),
        ({"whitespace": "remove"}, "NewYork", "New York", 1),
        ({"whitespace": "collapse", "strip": False}, " New York", "New York", 0),
        ({"punctuation": "remove"}, "«Paris».", "Paris", 1),
        ({"punctuation": "remove"}, "-5", "5", 1),
        ({"extract": "#### (.*)"}, "2\n#### 3\n#### 4", "4", 1),
        ({"extract": "#### (.*)"}, "2\n#### 4\n#### 3", "4", 0),
        ({"extract": "#### (.*)"}, "4", "4", 0),
        ({"extract": "(?:a|(b))"}, "a", "4", 0),
        ({"extract": "(.*)"}, "4", "4", 1),
        ({"extract": "(.*)"}, "3\n4\n \n", "4", 1),
        ({"extract": r"(\d*)"}, "so 4.", "4", 1),
        ({"extract": r"(\d*)"}, "so", "4", 0),
    ],
)
def test_exact_match(settings, text, answer, score):
    assert one(ExactMatch(**settings), text, answer=answer) == score


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "the answer '' is empty once normalised"),
        (["a", " "], "is empty once normalised"),
        ([], "must be text, a whole number or a list of these"),
        (None, "must be text"),
        (True, "must be text"),
        (0.5, "must be text"),
    ],
)
def test_an_answer_that_cannot_be_matched_is_an_error_and_not_0(answer, message):
    with pytest.raises(ValueError, match=message):
        one(ExactMatch(), "", answer=answer)


def test_a_row_without_the_answer_names_the_keys_it_has():
    with pytest.raises(ValueError, match=r"metadata has no 'answer', only \['gold', 'id'\]"):
        one(ExactMatch(), "4", gold="4", id=1)


@pytest.mark.parametrize(
    "scorer", [ExactMatch(), MultipleChoice(), Pattern("a"), JsonValid(), Length(1), Arithmetic("answer")]
)
def test_a_sample_without_text_is_an_error(scorer):
    with pytest.raises(ValueError, match=r"r0\.p0/0 holds no text, and this scorer scores texts"):
        one(scorer, None, answer="A")


@pytest.mark.parametrize("kind", [ExactMatch, MultipleChoice])
@pytest.mark.parametrize(("pattern", "message"), [("(a)(b)", "1 group in parentheses, got 2"), ("[", "regular")])
def test_extract_is_a_regular_expression_with_one_group(kind, pattern, message):
    with pytest.raises(ValueError, match=message):
        kind(extract=pattern)


# --- pattern ---


@pytest.mark.parametrize(
    ("settings", "text", "score"),
    [
        (
            {"pattern": r"(?s)<think>.*</think>\s*<answer>.*</answer>\s*"},
            "<think>a\nb</think>\n<answer>4</answer>\n",
            1,
        ),
        ({"pattern": r"(?s)<think>.*</think>\s*<answer>.*</answer>\s*"}, "So <think>a</think><answer>4</answer>", 0),
        ({"pattern": "[0-9]+"}, "12", 1),
        ({"pattern": "[0-9]+"}, "12\n", 0),
        ({"pattern": "[0-9]+"}, "", 0),
        ({"pattern": "[0-9]+", "match": "search"}, "it is 12", 1),
        ({"pattern": "[0-9]+", "match": "search"}, LONG, 0),
        ({"pattern": "é+", "match": "search"}, "café", 1),
    ],
)
def test_pattern(settings, text, score):
    assert one(Pattern(**settings), text) == score


def test_a_pattern_that_does_not_compile_is_refused():
    with pytest.raises(ValueError, match=r"pattern is no regular expression: .* \(got '\('\)"):
        Pattern("(")


# --- length ---


@pytest.mark.parametrize(
    ("settings", "text", "score"),
    [
        ({"least": 2}, "one two", 1),
        ({"least": 2}, "one", 0),
        ({"most": 3}, "", 1),
        ({"most": 3}, "a b c d", 0),
        ({"least": 10, "most": 10, "slack": 4}, "w " * 10, 1),
        ({"least": 10, "most": 10, "slack": 4}, "w " * 11, 0.75),
        ({"least": 10, "most": 10, "slack": 4}, "w " * 7, 0.25),
        ({"least": 10, "most": 10, "slack": 4}, "w " * 14, 0),
        ({"least": 10, "most": 10, "slack": 4}, LONG, 0),
        ({"least": 10, "most": 10, "slack": 4}, "", 0),
        ({"least": 4, "most": 4, "unit": "characters"}, "cafe\u0301", 1),
        ({"least": 2, "most": 2, "unit": "characters"}, "你好", 1),
        ({"least": 1, "most": 1}, "你好", 1),
        ({"least": 1, "most": 1, "unit": "characters"}, " ", 1),
        ({"least": 1, "most": 1}, "a\u00a0", 1),
    ],
)
def test_length(settings, text, score):
    assert one(Length(**settings), text) == score


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give least, most or both"),
        ({"least": -1}, "at least 0, got -1 and 0"),
        ({"least": 1, "slack": -1}, "at least 0, got 1 and -1"),
        ({"least": 5, "most": 4}, "most=4 is below least=5"),
    ],
)
def test_a_length_that_says_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Length(**settings)


# --- all of them ---


@pytest.mark.parametrize(
    "scorer",
    [
        ExactMatch(),
        MultipleChoice(),
        Pattern("[A-D]"),
        JsonValid(schema={"type": "integer"}),
        Length(1, 3, 4, "characters"),
        Arithmetic("sum"),
    ],
    ids=lambda scorer: type(scorer).__name__,
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_scores_do_not_depend_on_the_batch_and_stay_in_order(scorer, batch):
    texts = ["A", "B", "3", "", "A and B", "33", "{}", "wörter", "a", "4"]
    samples = [wrote(text, answer="A", sum="1 + 2") for text in texts]
    whole = scorer.score(samples)
    assert [v for at in range(0, 10, batch) for v in scorer.score(samples[at : at + batch])] == whole
    assert len(set(whole)) > 1
    assert all(math.isfinite(value) for value in whole)
