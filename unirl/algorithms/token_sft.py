"""Supervised fine-tuning of a language model: cross entropy of the given tokens."""

from __future__ import annotations

import dataclasses

from unirl.algorithms.base import AlgorithmOutput, Needs
from unirl.algorithms.token_base import ARContext, TokenAlgorithm, TokenAnchors
from unirl.types.sample import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSFT(TokenAlgorithm):
    """`-log pi` of each trained token; by default their mean over the optimizer step, as in transformers' own loss."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def anchors(self, context: ARContext, part: Part) -> TokenAnchors | None:
        return None

    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        replay = context.stage.replay(part)
        return AlgorithmOutput(-replay.log_probs, {"train/entropy": replay.entropy})
