"""TrainedTokens: a conversation as supervised training reads it."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class TrainedTokens:
    """One conversation of L tokens.

    tokens:   L ids, placeholders of pictures expanded
    trained:  of each token, whether it is learnt: those of the assistant, with the end token of each turn
    pictures: tensors by the name under which the model takes them; they stand before the first trained token
    """

    tokens: list[int]
    trained: list[bool]
    pictures: dict[str, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.trained):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.trained)} flags are no conversation")
        if True not in self.trained:
            raise ValueError("no token of the conversation is the assistant's: there is nothing to learn from it")
        if self.trained[0]:
            raise ValueError("the conversation opens with the assistant: a response needs a token to start from")

    @property
    def prompt(self) -> int:
        """How many tokens stand before the first trained one."""
        return self.trained.index(True)

    @property
    def length(self) -> int:
        """How many tokens there are up to the last trained one; nothing is learnt from what follows."""
        return len(self.trained) - self.trained[::-1].index(True)
