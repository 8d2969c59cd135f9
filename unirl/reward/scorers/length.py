"""Is the text as long as it should be?"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Literal

from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class Length(Scorer):
    """1 where the length is in [least, most], falling linearly to 0 over `slack` more or less; in [0, 1].

    most:  None is no upper end; least = most is a target length
    slack: 0 makes it 1 or 0
    unit:  characters: code points (NFC), blanks included; words: what stands between blanks, so that a Chinese sentence
           is one
    """

    reads = frozenset({"text"})

    least: int = 0
    most: int | None = None
    slack: int = 0
    unit: Literal["characters", "words"] = "words"

    def __post_init__(self) -> None:
        if self.least < 0 or self.slack < 0:
            raise ValueError(f"least and slack must be at least 0, got {self.least} and {self.slack}")
        if self.most is None and self.least == 0:
            raise ValueError("every text has a length of 0 or more: give least, most or both")
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most={self.most} is below least={self.least}: no text could score 1")

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample.written) for sample in samples]

    def _score(self, text: str) -> float:
        length = len(text.split()) if self.unit == "words" else len(unicodedata.normalize("NFC", text))
        missing = self.least - length
        extra = 0 if self.most is None else length - self.most
        off = max(0, missing, extra)
        if off == 0:
            return 1.0
        return max(0.0, 1 - off / self.slack) if self.slack else 0.0
