"""A language task that a small model learns in seconds: sort digits, from examples that go up or down at random.

After SFT the model cannot know which way is asked for, and writes both; a reward for the ascending one decides.
Examples that forget repeated digits, and mostly go down, make its likeliest answer wrong: the reward has more to find.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from unirl.data.conversations import ConversationSource
from unirl.data.prompts import PromptRow, PromptSource
from unirl.types.conversation import Conversation, Message

_HELD_OUT = 500


@dataclasses.dataclass(frozen=True)
class SortPrompts(PromptSource):
    """Prompts such as "sort 31415:", with the answer "11345" in the metadata.

    part:   no prompt is of both; held-out ones there are 500
    number: of prompts
    digits: in each prompt
    """

    part: Literal["train", "held_out"] = "train"
    number: int = 10_000
    digits: int = 5

    def __post_init__(self) -> None:
        _refuse_range(self.part, self.number, self.digits)

    def rows(self) -> tuple[PromptRow, ...]:
        sequences = _sequences(self.part, self.number, self.digits)
        return tuple(PromptRow(_prompt(given), {"answer": "".join(sorted(given))}) for given in sequences)


@dataclasses.dataclass(frozen=True)
class SortExamples(ConversationSource):
    """The prompts of `SortPrompts` with a response each.

    descending: share of responses that go down, at random
    forgotten:  share of repeated digits that are left out, at random: of "11345" the second 1
    """

    part: Literal["train", "held_out"] = "train"
    number: int = 10_000
    digits: int = 5
    descending: float = 0.5
    forgotten: float = 0.0

    def __post_init__(self) -> None:
        _refuse_range(self.part, self.number, self.digits)
        for name, share in (("descending", self.descending), ("forgotten", self.forgotten)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is a share in [0, 1], got {share}")

    def count(self) -> int:
        return self.number

    def rows(self) -> tuple[Conversation, ...]:
        coin, memory = (random.Random(f"{name}/{self.part}") for name in ("directions", "repeats"))
        rows = []
        for given in _sequences(self.part, self.number, self.digits):
            whole = sorted(given, reverse=coin.random() < self.descending)
            kept = [
                digit
                for place, digit in enumerate(whole)
                if digit not in whole[:place] or memory.random() >= self.forgotten
            ]
            rows.append((Message("user", (_prompt(given),)), Message("assistant", ("".join(kept),))))
        return tuple(rows)


def _prompt(given: str) -> str:
    return f"sort {given}:"


def _sequences(part: str, number: int, digits: int) -> list[str]:
    """The digits of each prompt, all different."""
    held_out = random.Random("held out").sample(range(10**digits), _HELD_OUT)
    if part == "held_out":
        chosen = held_out[:number]
    else:
        drawn = random.Random("train").sample(range(10**digits), number + _HELD_OUT)
        taken = set(held_out)
        chosen = [value for value in drawn if value not in taken][:number]
    return [f"{value:0{digits}d}" for value in chosen]


def _refuse_range(part: str, number: int, digits: int) -> None:
    if not 4 <= digits <= 9:
        raise ValueError(f"digits must be 4 to 9, got {digits}")
    there = _HELD_OUT if part == "held_out" else 10**digits - _HELD_OUT
    if not 1 <= number <= there:
        raise ValueError(f"number={number}: of {digits} digits there are {there} prompts in the part {part}")
