"""Is the answer in the text the one that the prompt's row gives?"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from typing import Literal

from unirl.reward.patterns import check_pattern, last_group
from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class ExactMatch(Scorer):
    """1 where the text equals `metadata[answer]`, or one of them where that is a list, else 0; both are normalised.

    answer:      key of the answer: text, a whole number, or a list of these
    extract:     regular expression with one group: the last that is not blank is compared instead of the whole text,
                 and a text without one scores 0; with one repetition in another, `(a+)+`, give a `time_limit`
    strip:       without blanks at both ends
    whitespace:  keep; collapse: every run of blanks is one space; remove
    casefold:    case does not count, in any language
    punctuation: keep; remove: without characters of the Unicode categories P (a minus sign and a decimal point are two)

    The form of accents never counts (NFC). An answer that is empty after that has no score: any empty text would be it.
    """

    reads = frozenset({"text"})

    answer: str = "answer"
    extract: str | None = None
    strip: bool = True
    whitespace: Literal["keep", "collapse", "remove"] = "keep"
    casefold: bool = False
    punctuation: Literal["keep", "remove"] = "keep"

    def __post_init__(self) -> None:
        if self.extract is not None:
            check_pattern("extract", self.extract, groups=1)

    def check_row(self, row: ScorerInput) -> None:
        self.score([row])

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def normalised(self, text: str) -> str:
        """What is compared."""
        text = unicodedata.normalize("NFC", text)
        if self.casefold:
            text = unicodedata.normalize("NFC", text.casefold())
        if self.punctuation == "remove":
            text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
        if self.whitespace != "keep":
            text = re.sub(r"\s+", " " if self.whitespace == "collapse" else "", text)
        return text.strip() if self.strip else text

    def _score(self, sample: ScorerInput) -> float:
        accepted = [self.normalised(answer) for answer in self._answers(sample)]
        if not all(accepted):
            raise ValueError(f"{sample.id}: the answer {sample.given(self.answer)!r} is empty once normalised")
        found = sample.written if self.extract is None else last_group(self.extract, sample.written)
        return float(found is not None and self.normalised(found) in accepted)

    def _answers(self, sample: ScorerInput) -> list[str]:
        given = sample.given(self.answer)
        answers = given if isinstance(given, list | tuple) else [given]
        if not answers or not all(type(answer) in (str, int) for answer in answers):
            raise ValueError(
                f"{sample.id}: metadata[{self.answer!r}] must be text, a whole number or a list of these, got {given!r}"
            )
        return [str(answer) for answer in answers]
