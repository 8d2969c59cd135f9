"""A reward of text without a model; it imports no torch, so that `unirl check` can load it."""

from __future__ import annotations

import dataclasses

from unirl.reward.scorer import Scorer, ScorerInput


@dataclasses.dataclass(frozen=True)
class DigitShare(Scorer):
    """The share of digits among the characters of a text."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        texts = [sample.text or "" for sample in samples]
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]
