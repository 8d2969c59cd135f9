"""A language task with a wrong majority: how often each digit occurs, from examples that forget most of the repeats.

The likeliest answer of a model after SFT has no count; it is wrong wherever a digit stands twice. A reward for the whole
tally decides, and held-out prompts have digits that no training prompt has in any order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Literal

from unirl.data.conversations import ConversationSource
from unirl.data.prompts import PromptRow, PromptSource
from unirl.types.conversation import Conversation, Message

_HELD_OUT = 500


@dataclasses.dataclass(frozen=True)
class TallyPrompts(PromptSource):
    """Prompts such as "count 31415926:", with the answer "1*2 2 3 4 5 6 9" in the metadata.

    part:   no prompt of one holds the digits of a prompt of the other, in any order; held-out ones there are 500
    number: of prompts; each holds other digits than the rest
    digits: in each prompt
    """

    part: Literal["train", "held_out"] = "train"
    number: int = 4_000
    digits: int = 6

    def __post_init__(self) -> None:
        _refuse_range(self.part, self.number, self.digits)

    def rows(self) -> tuple[PromptRow, ...]:
        sequences = _sequences(self.part, self.number, self.digits)
        return tuple(PromptRow(_prompt(given), {"answer": _tally(given, lambda: True)}) for given in sequences)


@dataclasses.dataclass(frozen=True)
class TallyExamples(ConversationSource):
    """The prompts of `TallyPrompts` with a response each. forgotten: share of counts that are left out, at random."""

    part: Literal["train", "held_out"] = "train"
    number: int = 4_000
    digits: int = 6
    forgotten: float = 0.7

    def __post_init__(self) -> None:
        _refuse_range(self.part, self.number, self.digits)
        if not 0 <= self.forgotten <= 1:
            raise ValueError(f"forgotten is a share in [0, 1], got {self.forgotten}")

    def count(self) -> int:
        return self.number

    def rows(self) -> tuple[Conversation, ...]:
        coin = random.Random(f"counts/{self.part}")
        return tuple(
            (
                Message("user", (_prompt(given),)),
                Message("assistant", (_tally(given, lambda: coin.random() >= self.forgotten),)),
            )
            for given in _sequences(self.part, self.number, self.digits)
        )


def _prompt(given: str) -> str:
    return f"count {given}:"


def _tally(given: str, kept: Callable[[], bool]) -> str:
    """The digits that occur, going up; `kept` is asked about the count of each that does so more than once."""
    counts = sorted(Counter(given).items())
    return " ".join(f"{digit}*{count}" if count > 1 and kept() else digit for digit, count in counts)


def _sequences(part: str, number: int, digits: int) -> list[str]:
    """The digits of each prompt, in an order drawn for it."""
    order = random.Random("tallies")
    all_ = ["".join(order.sample(given, digits)) for given in itertools.combinations_with_replacement("0123456789", digits)]
    order.shuffle(all_)
    return (all_[:_HELD_OUT] if part == "held_out" else all_[_HELD_OUT:])[:number]


def _refuse_range(part: str, number: int, digits: int) -> None:
    if not 4 <= digits <= 9:
        raise ValueError(f"digits must be 4 to 9, got {digits}")
    there = _HELD_OUT if part == "held_out" else math.comb(digits + 9, digits) - _HELD_OUT
    if not 1 <= number <= there:
        raise ValueError(f"number={number}: of {digits} digits there are {there} prompts in the part {part}")
