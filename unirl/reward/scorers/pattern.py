"""Does the text have the form that a regular expression describes?"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from unirl.reward.patterns import check_pattern
from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class Pattern(Scorer):
    r"""1 where `pattern` matches, else 0: a reward of form, such as `(?s)<think>.*</think>\s*<answer>.*</answer>\s*`.

    match: full: it must be the whole text; search: any part of it

    In Python's notation: `(?s)` lets a dot match a line break, `(?i)` ignores case. Give a pattern with one repetition
    in another, `(a+)+`, a `time_limit`: some texts take it for ever.
    """

    reads = frozenset({"text"})

    pattern: str
    match: Literal["full", "search"] = "full"

    def __post_init__(self) -> None:
        check_pattern("pattern", self.pattern)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        matches = re.fullmatch if self.match == "full" else re.search
        return [float(matches(self.pattern, sample.written) is not None) for sample in samples]
