"""What replay needs beside the segment: encoded prompts."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch

from unirl.types.batch import Rows, dense, listed, nested, packed, padded, shared


@dataclasses.dataclass(frozen=True, eq=False)
class Embedding(Rows):
    """Encoded prompts of one guidance branch.

    tokens: `(N, L, D)` hidden states, or `(N, L)` ids where the transformer embeds them itself
    pooled: `(N, P)`, where the model takes one vector a prompt
    mask:   `(N, L)` bool, True where a token is real; None where the model attends to all of them

    What is not text, where a family has it (a subclass adds what is its own, such as the latents of source pictures):
    weights: `(*latent)`, how much each latent element counts in log-probs, KL and losses; None counts all alike
    given:   `(N, *latent)`, values of the elements of weight 0: they are not generated
    """

    tokens: torch.Tensor = padded(mask="mask")
    pooled: torch.Tensor | None = dense(None)
    mask: torch.Tensor | None = padded(None, mask="mask")
    weights: torch.Tensor | None = shared(None)
    given: torch.Tensor | None = dense(None)

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        if self.mask is not None and self.mask.shape[1] != self.tokens.shape[1]:
            raise ValueError(f"a mask of {self.mask.shape[1]} positions does not fit {self.tokens.shape[1]} tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class Conditions(Rows):
    """The guidance branches of N samples.

    positive: the prompt
    negative: the unconditional branch; None means that no guidance is applied
    """

    positive: Embedding = nested()
    negative: Embedding | None = nested(None)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptTokens(Rows):
    """Prompts of N samples of a language model, packed end to end.

    tokens:   `(sum P,)` int64, placeholders of pictures expanded
    lengths:  `(N,)` int64
    pictures: N dicts of tensors by the name under which the model takes them, empty in a row without pictures; None
              where the model takes none
    """

    tokens: torch.Tensor = packed("lengths")
    lengths: torch.Tensor = dense()
    pictures: list[dict[str, torch.Tensor]] | None = listed(None)

    def to(self, device: torch.device | str) -> Self:
        """Tokens on `device`. Pictures, of which siblings share one copy, stay where they are until a forward."""
        return dataclasses.replace(self, tokens=self.tokens.to(device), lengths=self.lengths.to(device))
