"""Prompts as the tokens of an encoder that reads no more than so many."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)


class PromptTokens:
    """Tokenizes to `length` at most.

    cut: prompts so far that were longer, whose end was not read; the first is logged
    """

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.cut = 0

    def __call__(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, `(N, length)`, padded on the right."""
        texts = list(prompts)
        whole = self.tokenizer(texts, verbose=False).input_ids
        longer = [text for text, ids in zip(texts, whole, strict=True) if len(ids) > self.length]
        if longer and not self.cut:
            _log.warning(
                "prompts of more than %d tokens are cut, and scored without their end: %r", self.length, longer[0]
            )
        self.cut += len(longer)
        tokens = self.tokenizer(
            texts,
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        return {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
