"""Is the last number in the text the value of the expression that was asked for? Exact, and nothing is executed."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from unirl.reward.scorer import Scorer, ScorerInput

_LONGEST = 1000  # characters of an expression, and of a number in a text
_DEEPEST = 50  # parentheses in parentheses
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_TOKEN = re.compile(rf"{_DECIMAL}|[-+*/()]")
_WORD = re.compile(r"(?:[\w.,/]|(?<=\d/)-)+")
_NUMBER = re.compile(rf"({_DECIMAL})(?:/(-?{_DECIMAL}))?")
_MINUS = re.compile(r"(?:(?<![\w)\]])-|(?:\A|[=:(])\s*-\s*)\Z")

# What may be an expression in a prompt is taken with all the mathematics that it touches, such as "x2^3 + [1,5 - 2]!":
# `evaluate` is the one that refuses. Counts and possessive repetitions keep the search linear in the prompt.
_WITH_DIGIT = r"(?<![\w.,])(?=[^\W\d]*+\d)\w++(?:[.,]\w++)*+"
_OPERAND = rf"(?:[-+(\[{{|√] ?){{0,50}}{_WITH_DIGIT}(?: ?[)\]}}|!%]){{0,50}}"
_EXPRESSION = re.compile(rf"{_OPERAND}(?: ?(?:[-+/^%]|\*\*?) ?{_OPERAND})+")
# Signs that the expression goes on to the left of a match, of which two characters are seen, or to the right of it.
_BEFORE = re.compile(
    r"(?:[\w.,!)\]}\\^%/√(\[{|+-]|\w\*+|[-+*/^%] |% of |\\[a-z]+ )(?=..\Z)"  # x(1 + 2), 2 * [1 + 2], 9% of 1 + 2
    r"|[-+] \Z|(?:\b\w|\d) (?=[-+(].\Z)"  # x^y - 1 + 2, 3 (1 + 2)
)
_AFTER = re.compile(r"[\w(^√]| ?\\[a-z]| ?[-+/^]|\*+[\w(]| \*| x\b")
_SIGNS = str.maketrans("＋−–－×·＊÷⁄／（）", "+---***///()")  # noqa: RUF001 - as they are written


@dataclasses.dataclass(frozen=True)
class Arithmetic(Scorer):
    """1 where the last number in the text is the value of the expression, else 0: 33 for "What is 12 + 7 * 3?".

    expression: key of the prompt's row that holds it; None takes the one in the prompt, which must hold exactly one

    Expressions: decimal numbers (1,234.5), + - * / (in print's signs as well), parentheses. A prompt whose expression
    touches other mathematics has no score: "2^3 + 1", "sqrt(4) + 3", "20% of 50 + 1", "x - 3 + 5".

    Numbers in the text: -1,234.5 or 7/-2; 0.333 is not 1/3. One that is written otherwise (1e3, 3,5, 33kg) is still the
    last number, and equals nothing. "- 5" is -5 at the start of the text and after = : (, else a dash before 5.
    """

    reads = frozenset({"text"})

    expression: str | None = None

    def check_row(self, row: ScorerInput) -> None:
        self.score([row])

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float(last_number(sample.written) == evaluate(self._expression(sample))) for sample in samples]

    def _expression(self, sample: ScorerInput) -> str:
        if self.expression is not None:
            given = sample.given(self.expression)
            if not isinstance(given, str):
                raise ValueError(f"{sample.id}: metadata[{self.expression!r}] must be text, got {given!r}")
            return given
        prompt = " ".join(sample.prompt.translate(_SIGNS).split())
        matches = list(_EXPRESSION.finditer(prompt))
        found = {_own_part(match[0][: _LONGEST + 1].replace(" ", "")) for match in matches}
        hint = "let `expression` name the key of the prompt's row that holds it"
        if len(found) != 1:
            raise ValueError(f"{sample.id}: the prompt {sample.prompt!r} holds {len(found)} expressions: {hint}")
        for match in matches:
            start, end = match.span()
            if _BEFORE.search(prompt[max(0, start - 16) : start + 2]) or _AFTER.match(prompt, end):
                around = prompt[max(0, start - 16) : end + 16]
                raise ValueError(f"{sample.id}: {match[0]!r} is not all of the expression in {around!r}: {hint}")
        return found.pop()


def evaluate(expression: str) -> Fraction:
    """`evaluate("12 + 7 * 3") == 33`; ValueError for what is no expression, or has no value."""
    plain = expression.translate(_SIGNS)
    if len(plain) > _LONGEST or plain.count("(") > _DEEPEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters and {_DEEPEST} parentheses: {plain[:80]!r}")
    if _TOKEN.sub("", plain).strip():
        raise ValueError(f"{expression!r} is no expression of decimal numbers, + - * / and parentheses")
    tokens = _TOKEN.findall(plain)
    tokens.reverse()
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        raise ValueError(f"{expression!r} has no value: it is not complete, or divides by 0") from None
    if tokens:
        raise ValueError(f"{expression!r} goes on where it should end, at {''.join(reversed(tokens))!r}")
    return value


def last_number(text: str) -> Fraction | None:
    """`last_number("12 + 21 = 33.") == 33`; None where there is none, or the last is written in another way."""
    plain, last = text.translate(_SIGNS), None
    for word in _WORD.finditer(plain):
        if word[0].lstrip("_")[:1].isdigit():
            last = word
    if last is None or len(last[0]) > _LONGEST:
        return None
    number = _NUMBER.fullmatch(last[0].strip("_").rstrip("_.,/"))
    if number is None:
        return None
    below = _decimal(number[2] or "1")
    if below == 0:
        return None
    value = _decimal(number[1]) / below
    return -value if _MINUS.search(plain[: last.start()]) else value


def _decimal(written: str) -> Fraction:
    return Fraction(written.replace(",", ""))


def _own_part(expression: str) -> str:
    """In "(such as 12 + 7)" the last parenthesis closes what is not the expression's."""
    while expression.count(")") > expression.count("("):
        expression = expression[: expression.rindex(")")]
    return expression


def _sum(tokens: list[str]) -> Fraction:
    """The tokens stand in reverse, so that the next one is the last."""
    value = _product(tokens)
    while tokens and tokens[-1] in "+-":
        value = value + _product(tokens) if tokens.pop() == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _operand(tokens)
    while tokens and tokens[-1] in "*/":
        value = value * _operand(tokens) if tokens.pop() == "*" else value / _operand(tokens)
    return value


def _operand(tokens: list[str]) -> Fraction:
    sign = 1
    while tokens[-1] in "+-":
        sign = -sign if tokens.pop() == "-" else sign
    if tokens[-1] != "(":
        return sign * _decimal(tokens.pop())
    tokens.pop()
    value = _sum(tokens)
    if tokens.pop() != ")":
        raise IndexError
    return sign * value
