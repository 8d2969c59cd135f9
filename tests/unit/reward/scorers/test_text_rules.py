"""Closed values of the scorers that read a text by rules."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reward.samples import wrote
from unirl.reward.scorer import Scorer
from unirl.reward.scorers.arithmetic import Arithmetic, evaluate, last_number
from unirl.reward.scorers.exact_match import ExactMatch
from unirl.reward.scorers.json_valid import JsonValid
from unirl.reward.scorers.length import Length
from unirl.reward.scorers.multiple_choice import MultipleChoice
from unirl.reward.scorers.pattern import Pattern

LONG = "word " * 200_000


def one(scorer: Scorer, text: str | None, prompt: str = "", **metadata: Any) -> float:
    (score,) = scorer.score([wrote(text, prompt, **metadata)])
    return score


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


# --- multiple choice ---


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


# --- JSON ---

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": [1, 2.5, null, true, "é 😀"]}', 1),
        (" 1 \n", 1),
        ("{}", 1),
        ("", 0),
        ("{'a': 1}", 0),
        ('{"a": 1,}', 0),
        ('{"a": 1, "a": 1}', 0),
        ('{"b": {"a": 1, "a": 2}}', 0),
        ('{"a": NaN}', 0),
        ("[Infinity]", 0),
        ("[-Infinity]", 0),
        ('{"a": 1} and so on', 0),
        ('So: {"a": 1}', 0),
        ('```json\n{"a": 1}\n```', 0),
        ('"a\nb"', 0),
        ("\ufeff{}", 0),
        ("9" * 5000, 0),
        ("[" * 50 + "]" * 50, 1),
        ("[" * 51 + "]" * 51, 0),
        ("[" * 100_000, 0),
        ("[" * 900 + "]" * 900, 0),
        ('{"a": ' * 100_000, 0),
        (LONG, 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_without_a_schema(text, score):
    assert one(JsonValid(), text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ann", "age": 3}', 1),
        ('{"name": "Ann"}', 1),
        ('{"age": 3}', 0),
        ('{"name": "Ann", "age": -1}', 0),
        ('{"name": "Ann", "age": "3"}', 0),
        ('{"name": "Ann", "more": 1}', 0),
        ("[]", 0),
        ("no", 0),
    ],
)
def test_json_with_a_schema_inline_or_of_the_row(text, score):
    assert one(JsonValid(schema=PERSON), text) == score
    assert one(JsonValid(schema_key="form"), text, form=PERSON) == score


def test_the_deepest_text_is_still_validated_by_a_schema_that_calls_itself():
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    assert one(JsonValid(schema=tree), "[" * 50 + "]" * 50) == 1
    assert one(JsonValid(schema=tree), "[" * 49 + "1" + "]" * 49) == 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('```json\n{"a": 1}\n```', 1),
        ('```\n{"a":\n 1}\n```\n', 1),
        ('{"a": 1}', 1),
        ('```json\n{"a": 1}', 0),
        ('Here:\n```json\n{"a": 1}\n```', 0),
        ("```json\n1\n```\n```json\n2\n```", 0),
        ("```python\n1\n```", 0),
    ],
)
def test_one_code_fence_around_all_is_accepted_where_asked_for(text, score):
    assert one(JsonValid(fences=True), text) == score


def test_a_schema_never_fetches_and_one_that_refers_elsewhere_is_an_error_and_not_0():
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        one(JsonValid(schema={"$ref": "http://127.0.0.1:9/schema.json"}), "{}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schema": {"type": "objekt"}}, "schema is no JSON schema: 'objekt' is not valid"),
        ({"schema": {"$schema": "draft-99"}}, "unknown draft"),
        ({"schema": {}, "schema_key": "form"}, "not both"),
    ],
)
def test_a_schema_that_is_wrong_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        JsonValid(**settings)


@pytest.mark.parametrize("draft", [jsonschema.Draft7Validator, jsonschema.Draft202012Validator])
def test_a_schema_may_name_its_draft(draft):
    assert one(JsonValid(schema={"$schema": draft.META_SCHEMA["$schema"], "type": "integer"}), "1") == 1


def test_a_row_without_a_schema_object_is_an_error():
    with pytest.raises(ValueError, match="a JSON schema is an object, got None"):
        one(JsonValid(schema_key="form"), "{}", form=None)


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


# --- arithmetic ---


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 7 * 3", Fraction(33)),
        ("(12 + 7) * 3", Fraction(57)),
        ("2 - 3 - 4", Fraction(-5)),
        ("12 / 4 / 3", Fraction(1)),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("-3 * -(2 + 1)", Fraction(9)),
        ("--3", Fraction(3)),
        ("7 − 2 × 3 ÷ 6", Fraction(6)),  # noqa: RUF001 - as they are printed
        ("((((5))))", Fraction(5)),
        ("007", Fraction(7)),
        ("٣ + ٤", Fraction(7)),
    ],
)
def test_expressions_are_evaluated_exactly(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1 / 0", "1 / (2 - 2)", "(1 + 2", "1 + 2)", "1 2", "2 ** 3", "* 2", "()", "x + 1", "1e9", "1.2.3",
        "__import__('os')", "(" * 51 + "1" + ")" * 51, "9" * 1001, "1" + "+1" * 500,
    ],
    ids=lambda value: value[:16],
)  # fmt: skip
def test_what_is_no_expression_is_an_error(expression):
    with pytest.raises(ValueError, match=r"expression|value|goes on"):
        evaluate(expression)


TERM = st.one_of(st.integers(0, 99).map(str), st.decimals(0, 99, places=2).map(str))
EXPRESSION = st.recursive(
    TERM,
    lambda inner: st.builds(lambda a, op, b: f"({a} {op} {b})", inner, st.sampled_from("+-*"), inner),
    max_leaves=12,
)


@given(EXPRESSION)
def test_values_are_those_of_pythons_own_arithmetic(expression):
    assert float(evaluate(expression)) == pytest.approx(eval(expression), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("33", 33),
        ("The answer is 33.", 33),
        ("12 + 7 * 3 = 33", 33),
        ("33, as 12 + 21", 21),
        ("= -3", -3),
        ("−3", -3),  # noqa: RUF001 - as it is printed
        ("12-7", 7),
        ("(12)-7", 7),
        ("**33**", 33),
        ("_33_", 33),
        ("$33$", 33),
        ("\\boxed{33}", 33),
        ("1,234", 1234),
        ("1,234,567.5", Fraction("1234567.5")),
        ("7/2", Fraction(7, 2)),
        ("-7/2", Fraction(-7, 2)),
        ("3.50", Fraction(7, 2)),
        ("３３", 33),  # noqa: RUF001 - full-width
        ("x3 = 33 for H2O", 33),
        ("3,5", None),
        ("33 or 3,5", None),
        ("33 or 1,23", None),
        ("1e3", None),
        ("33kg", None),
        ("10²", None),
        ("1/0", None),
        ("1.2.3", None),
        ("9" * 2000, None),
        ("", None),
        ("none", None),
        (LONG, None),
        ("1" * 500_000, None),
        ("1 " * 200_000 + "33", 33),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("prompt", "text", "score"),
    [
        ("What is 12 + 7 * 3?", "33", 1),
        ("What is 12 + 7 * 3?", "57", 0),
        ("What is 12 + 7 * 3?", "", 0),
        ("Compute (1 + 2) * -3.", "It is -9.", 1),
        ("Say a sum (such as 12 + 7)", "19", 1),
        ("1. What is 1 / 3?", "1/3", 1),
        ("1. What is 1 / 3?", "0.333", 0),
        ("12+7 (that is, 12 + 7)", "19", 1),
        ("７ × ８ = ?", "56", 1),  # noqa: RUF001 - full-width
    ],
)
def test_arithmetic_of_the_prompt(prompt, text, score):
    assert one(Arithmetic(), text, prompt) == score


@pytest.mark.parametrize(("prompt", "count"), [("What is twelve?", 0), ("1 + 2 or 3 + 4?", 2), ("", 0)])
def test_a_prompt_that_does_not_hold_one_expression_is_an_error(prompt, count):
    with pytest.raises(ValueError, match=f"holds {count} expressions"):
        one(Arithmetic(), "3", prompt)


def test_arithmetic_of_the_row():
    assert one(Arithmetic("sum"), "so 5", "1 + 1", sum="2 + 3") == 1
    with pytest.raises(ValueError, match=r"metadata\['sum'\] must be text, got 5"):
        one(Arithmetic("sum"), "so 5", sum=5)


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
