"""Which letter does a free answer name?"""

from __future__ import annotations

import dataclasses
import re
import string
import unicodedata

from unirl.reward.patterns import check_pattern, last_group
from unirl.reward.scorer import Scorer, ScorerInput

# "A" and "I" before a small letter are words, unless one of these follows: "A is right", "A nor B".
_AFTER_A_LETTER = "is|was|seems|would|because|since|as|and|or|nor|but|vs|versus|not|fits|works|matches"


@dataclasses.dataclass(frozen=True)
class MultipleChoice(Scorer):
    """1 where the text names the letter `metadata[answer]` and no other one, else 0. Two letters named: 0, always.

    answer:  key of the letter
    choices: A is the first letter, and this many there are
    extract: regular expression with one group: only the last that is not blank is read, and a text without one scores
             0; for texts that weigh the choices first, such as `(?s)</think>(.*)`

    Named is: a text that is the letter alone; a capital that stands alone ("it is B, because", "A-B", "A+B"), but for
    the words A and I; either case in brackets, quotes or asterisks, before `)`, `.` or `:` at the start of a line, and
    after "answer", "option" or "choice".

    The word A is one that begins a sentence before a small letter ("A dog"), the word I any before a small letter
    ("so I think"), unless it goes on as with a letter ("A is right", "A nor B"). Within a sentence, where the article
    is small, A is the letter: "choice A works".
    """

    reads = frozenset({"text"})

    answer: str = "answer"
    choices: int = 4
    extract: str | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.choices <= 26:
            raise ValueError(f"choices is in 2..26, got {self.choices}")
        if self.extract is not None:
            check_pattern("extract", self.extract, groups=1)

    def check_row(self, row: ScorerInput) -> None:
        self.score([row])

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def named(self, text: str) -> set[str]:
        """The letters that `text` names, as capitals."""
        text = unicodedata.normalize("NFKC", text)
        return {match[1].upper() for pattern in _patterns(self._letters) for match in re.finditer(pattern, text)}

    @property
    def _letters(self) -> str:
        return string.ascii_uppercase[: self.choices]

    def _score(self, sample: ScorerInput) -> float:
        asked = sample.given(self.answer)
        if not isinstance(asked, str) or len(asked) != 1 or asked.upper() not in self._letters:
            raise ValueError(
                f"{sample.id}: metadata[{self.answer!r}] must be one letter of {self._letters}, got {asked!r}"
            )
        text = sample.written if self.extract is None else last_group(self.extract, sample.written)
        return float(text is not None and self.named(text) == {asked.upper()})


def _patterns(letters: str) -> tuple[str, ...]:
    """Each with the letter as its group."""
    no_word = rf"(?!\s+(?!(?:{_AFTER_A_LETTER})\b)[a-z])"
    words = {"A": rf"A(?:(?<=[\w,;] A)|{no_word})", "I": f"I{no_word}"}
    capital = "|".join(words.get(letter, letter) for letter in letters)
    either = f"[{letters}{letters.lower()}]"
    alone = rf"[{letters}](?![^\W_])"
    return (
        rf"\A[\W_]*({either})[\W_]*\Z",
        rf"(?<![^\W_])(?<!\w\.)({capital})(?![^\W_]|['\u2019.]\w|-(?!{alone})\w|\+(?!{alone})|#)",
        rf"[(\[{{*_\"'\u201c\u2018`]({either})[)\]}}*_\"'\u201d\u2019`]",
        rf"(?m)^[ \t]*({either})[).:](?!\w)",
        rf"(?i:\b(?:answer|option|choice)\b)(?:\s+is)?\s*(?:[:=]\s*)?({either})(?=\s*(?:[.,;:!)]|$))",
    )
