"""Arithmetic with a gold answer, for recipes of models that know some: nothing to download."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from unirl.data.prompts import PromptRow, PromptSource

# First numbers of held-out prompts end in these: no easier than the others, as 5 and 0 would be.
_HELD_OUT = (3, 8)


@dataclasses.dataclass(frozen=True)
class Expressions(PromptSource):
    r"""Prompts such as "What is 47 * (83 - 26)? Put the answer in \boxed{}.", with the answer 2679 in the metadata.

    part:   no expression of one begins with a number that one of the other begins with
    number: of prompts, all different
    """

    part: Literal["train", "held_out"] = "train"
    number: int = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.number <= 10_000:
            raise ValueError(f"number must be 1 to 10000, got {self.number}")

    def rows(self) -> tuple[PromptRow, ...]:
        draw = random.Random(f"expressions/{self.part}")
        first = [value for value in range(10, 100) if (value % 10 in _HELD_OUT) == (self.part == "held_out")]
        found: dict[tuple[int, int, int, str], int] = {}
        while len(found) < self.number:
            one, two, three = draw.choice(first), draw.randint(10, 99), draw.randint(10, 99)
            sign = draw.choice("+-")
            found[one, two, three, sign] = one * (two + three if sign == "+" else two - three)
        return tuple(
            PromptRow(rf"What is {one} * ({two} {sign} {three})? Put the answer in \boxed{{}}.", {"answer": value})
            for (one, two, three, sign), value in found.items()
        )
