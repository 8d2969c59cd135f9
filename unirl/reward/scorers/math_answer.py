"""Is the answer in the text the same mathematics as the gold answer? Compared by math-verify (extra `unirl[math]`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import re
from decimal import Decimal
from typing import Any, ClassVar

from unirl.reward.scorer import Scorer, ScorerInput

_DECIMALS = 6  # to which numbers are compared; those below 1, after the zeros that they begin with
_NUMBER = r"-?\d(?:[\d.,/]*\d)?"
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_\s]+(?:\s+[^\W\d_\s]+)*")
_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
_MIXED = re.compile(r"(?<![\d.,/] )(?<![\d.,/])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d/])")
_BOXED_PERCENT = re.compile(r"(?<![\d.,])(\d+(?:\.\d+)?)\s*+\\?%(?=[\s$]*\})")
_ANSWER = re.compile(
    rf"(?i)(\A|\banswer(?:\s+is)?+\s*+:?)\s*+(?:\(({_NUMBER})\)|_+({_NUMBER})_+|({_NUMBER}))(?=[\s.;!]|\Z)"
)


@dataclasses.dataclass(frozen=True)
class MathAnswer(Scorer):
    r"""1 where the answer of the text equals `metadata[answer]` as mathematics, else 0: `\boxed{0.5}` is 1/2.

    answer: key of the gold answer, a number or LaTeX, with or without `$...$` or `\boxed{...}`

    The answer of a text is the last of its `\boxed{...}` and "final answer is $...$" (boxes close to one another are a
    set), else the formula after "answer" or `<answer>`, else the last formula or number. Numbers are equal to six
    decimals, below 1 to six digits after the zeros. `1 1/2` is 3/2, pi is a number, and 50% is 0.5; outside a box it
    also equals a gold answer of 50.

    A gold answer without mathematics, such as "5€", or of words only, such as "yes", has no score (NaN); write
    `\text{yes}` for a word that a text is to box, and `a*b` for a product, not `ab`. Not read in a text: digits that
    are not ASCII, "five", `\fbox`, a sign apart from its number ("- 5").

    math-verify 0.9 (Apache-2.0) with sympy: 1-40 ms a sample. Its own time limit works by signals, on the main thread
    only, and calls a slow sample wrong; it is off, and the service stops a sample after `time_limit`.
    """

    reads = frozenset({"text"})

    time_limit: ClassVar[float | None] = 10.0

    answer: str = "answer"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("MathAnswer needs math-verify, which is not installed: pip install 'unirl[math]'")

    def prepare(self) -> None:
        _verified("1/2", r"\boxed{0.5}")

    def check_row(self, row: ScorerInput) -> None:
        if not self._gold(row).strip():
            raise ValueError(f"{row.id}: the gold answer is empty")

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _gold(self, sample: ScorerInput) -> str:
        gold = sample.given(self.answer)
        if type(gold) not in (str, int, float):
            raise ValueError(f"{sample.id}: metadata[{self.answer!r}] must be a number or text, got {gold!r}")
        if not isinstance(gold, float):
            return str(gold)
        if not math.isfinite(gold):
            raise ValueError(f"{sample.id}: no mathematics found in the gold answer {gold!r}")
        return format(Decimal(str(gold)), "f")

    def _score(self, sample: ScorerInput) -> float:
        gold = self._gold(sample)
        found = _verified(gold, sample.written)
        if found is None:
            raise ValueError(f"{sample.id}: no mathematics found in the gold answer {gold!r}")
        return float(found)


def _verified(gold: str, text: str) -> bool | None:
    """None where the gold answer cannot be read. What cannot be read in the text, or compared, is a wrong answer."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its own time limit is off
    asked = _parsed(_plain(rf"\boxed{{{gold}}}"))
    if not asked or _WORDS.fullmatch(_PI.sub(r"\\pi", gold).strip()):
        return None
    given = _parsed(_ANSWER.sub(_apart, _plain(text)))
    return verify(asked, given, float_rounding=_decimals(asked[0]), timeout_seconds=None)


def _parsed(text: str) -> list[Any]:
    """Without the string that math-verify falls back on: it would make a gold answer of anything."""
    from math_verify import parse

    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]: as documented


def _plain(text: str) -> str:
    """What math-verify does not read, or reads as something else, in its own notation."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("<answer>", "\nanswer: ").replace("</answer>", "\n")
    text = _MIXED.sub(_improper, _PI.sub(r"\\pi", text))
    return _BOXED_PERCENT.sub(r"\\frac{\1}{100}", text).replace(r"\%", "%")


def _improper(mixed: re.Match[str]) -> str:
    whole, above, below = map(int, mixed.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}"


def _apart(answer: re.Match[str]) -> str:
    """In "Answer:5", "answer is (5)" and "_5_" the number stands alone then, where math-verify looks for it."""
    return f"{answer[1]} {answer[2] or answer[3] or answer[4]}"


def _decimals(gold: Any) -> int:
    """To which two numbers are compared: 6 for 1/3, 11 or 12 for 0.000001."""
    from sympy import Expr, log

    if not isinstance(gold, Expr) or not gold.is_number or not gold.is_finite or gold.is_zero:
        return _DECIMALS
    return _DECIMALS + max(0, int(-log(abs(gold.evalf()), 10)))
