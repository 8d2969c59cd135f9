from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reward.samples import one
from unirl.reward.scorers.arithmetic import Arithmetic, evaluate, last_number

LONG = "word " * 200_000


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
        ("1,000 + 2,000.5", Fraction("3000.5")),
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
        "1,00 + 1", "1,0000",
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
        ("7/-2", Fraction(-7, 2)),
        ("- 5", -5),
        ("x = - 5", -5),
        ("answer:\n- 5", -5),
        ("apples - 5", 5),
        ("12 - 5", 5),
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
        ("1,000 + 5", "1,005", 1),
        ("5 + 3,000", "3005", 1),
        ("1,000,000 - 1", "999999", 1),
        ("7. 12 + 7 = ?", "19", 1),
        ("Task 7\n12 + 7.", "19", 1),
        ("What is **12 + 7**?", "19", 1),
        ("What is $12 + 7$?", "19", 1),
        ("Hello! What is -3 + 5, in words (two)?", "2", 1),
    ],
)
def test_arithmetic_of_the_prompt(prompt, text, score):
    assert one(Arithmetic(), text, prompt) == score


@pytest.mark.parametrize(("prompt", "count"), [("What is twelve?", 0), ("1 + 2 or 3 + 4?", 2), ("", 0)])
def test_a_prompt_that_does_not_hold_one_expression_is_an_error(prompt, count):
    with pytest.raises(ValueError, match=f"holds {count} expressions"):
        one(Arithmetic(), "3", prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "2^3 + 1", "2 ** 3 + 1", "1.5e3 + 2", "20% of 50 + 1", "5 + 3%", "5! + 3 + 1", "5 + 3!",
        "sqrt(4) + 3", "√(4) + 3", "3 + [4 - 2]", "|-3 + 2| + 1", "x2+3", "2x + 3", "3 + 4i", "5+3²", "x - 3 + 5",
        "x -3 + 5", "5 + 3 * x", "2(3 + 4)", "2 (3 + 4)",
        "(3 + 4)(1)", "(5 + 3) x 2", r"12 \times 4 + 2", r"4 + 2 \cdot 3", "x/3 + 4",
        "1,00 + 5", "1.000,5 + 2", "- 5 + 3", "-" * 60 + "1 + 1",
    ],
)  # fmt: skip
def test_an_expression_that_is_part_of_other_mathematics_is_an_error_and_no_other_value(prompt):
    with pytest.raises(ValueError, match=r"is no expression|has no value|is not all of the expression"):
        one(Arithmetic(), "3", prompt)


@pytest.mark.parametrize("piece", ["(", "- ", "1+", "1 ", "1)", "1+1)", "((1", "x", "9", "1 )", "\\a"])
def test_a_prompt_of_100_000_characters_is_read_in_seconds(piece):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"expression"):
        one(Arithmetic(), "3", piece * (100_000 // len(piece)))
    assert time.process_time() - began < 5


def test_arithmetic_of_the_row():
    assert one(Arithmetic("sum"), "so 5", "1 + 1", sum="2 + 3") == 1
    with pytest.raises(ValueError, match=r"metadata\['sum'\] must be text, got 5"):
        one(Arithmetic("sum"), "so 5", sum=5)
