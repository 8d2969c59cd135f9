"""Is the answer in the text the same mathematics as the gold answer? Compared by math-verify (extra `unirl[math]`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import ClassVar

from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class MathAnswer(Scorer):
    r"""1 where the answer of the text equals `metadata[answer]` as mathematics, else 0: `\boxed{0.5}` is 1/2.

    answer: key of the gold answer, a number or LaTeX, with or without `$...$` or `\boxed{...}`

    The answer of a text is the last of its `\boxed{...}` and "final answer is $...$" (boxes close to one another are a
    set), else the formula after "answer", else the last formula or number. A gold answer in which nothing is found has
    no score (NaN).

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
        return str(gold)

    def _score(self, sample: ScorerInput) -> float:
        gold = self._gold(sample)
        found = _verified(gold, sample.written)
        if found is None:
            raise ValueError(f"{sample.id}: no mathematics found in the gold answer {gold!r}")
        return float(found)


def _verified(gold: str, text: str) -> bool | None:
    """None where the gold answer cannot be read. What cannot be read in the text, or compared, is a wrong answer."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its own time limit is off
    asked = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]: None is documented
    if not asked:
        return None
    return verify(asked, parse(text, parsing_timeout=None), timeout_seconds=None)  # pyright: ignore[reportArgumentType]
