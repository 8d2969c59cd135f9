"""Half A of the digits with captions, a share of them wrong on purpose: a base that RL has something to teach."""

from __future__ import annotations

import dataclasses

import torch

from unirl.data.digits import HALF_A, digit_halves, digit_prompt
from unirl.data.prompts import PromptRow, PromptSource
from unirl.data.records import Records, RecordSource
from unirl.types.seed import generator


@dataclasses.dataclass(frozen=True)
class DigitCaptions(RecordSource):
    """wrong_share: share of captions that name another digit than the picture shows; seed: which, and what they say."""

    wrong_share: float = 0.45
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.wrong_share < 1:
            raise ValueError(f"wrong_share must be in [0, 1), got {self.wrong_share}")

    def count(self) -> int:
        return HALF_A

    def load(self) -> Records:
        images, labels, _, _ = digit_halves()
        source = generator(self.seed, "wrong captions")
        wrong = torch.zeros(len(labels), dtype=torch.bool)
        wrong[torch.randperm(len(labels), generator=source)[: round(self.wrong_share * len(labels))]] = True
        offset = torch.randint(1, 10, (len(labels),), generator=source)
        said = (torch.tensor(labels) + offset * wrong) % 10
        pictures = torch.tensor(images)[:, None].expand(-1, 3, -1, -1).contiguous()
        return Records(pictures, [digit_prompt(digit) for digit in said.tolist()])


@dataclasses.dataclass(frozen=True)
class DigitPrompts(PromptSource):
    """The ten prompts, each with the asked digit as metadata."""

    def rows(self) -> tuple[PromptRow, ...]:
        return tuple(PromptRow(digit_prompt(digit), {"digit": digit}) for digit in range(10))
