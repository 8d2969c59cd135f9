"""What text SFT does in place of a rollout: conversations as prompts and responses of tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.ar_stage import ARStage
from unirl.models.language.trained import TrainedTokens
from unirl.models.policy import Policy
from unirl.types.batch import Rows, dense, shared
from unirl.types.condition import PromptTokens
from unirl.types.conversation import Conversation, Turns
from unirl.types.sample import Part
from unirl.types.segment import TextSegment


@dataclasses.dataclass(frozen=True)
class TokenLimit:
    """max_tokens: of a conversation; None takes what the model's context holds, more than that is too long in any case
    too_long: a longer one is an error, is dropped, or is truncated at its end; one of which no trained token is left is
              dropped as well
    turns:    of the assistant, which ones are trained
    """

    max_tokens: int | None = None
    too_long: Literal["error", "drop", "truncate"] = "error"
    turns: Turns = "all"

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(
                f"max_tokens must be at least 2 (to read one, to learn one) or null, got {self.max_tokens}"
            )
        if self.max_tokens is None and self.too_long != "error":
            raise ValueError(f"too_long={self.too_long} needs max_tokens: name the length to drop or truncate at")

    def within(self, context: int) -> int:
        """The most tokens that a model of this context is given of a conversation."""
        return context if self.max_tokens is None else min(self.max_tokens, context)

    def named(self, context: int) -> str:
        """What sets `within`."""
        most = self.within(context)
        return f"max_tokens={most}" if most == self.max_tokens else f"the model's context of {most}"


@dataclasses.dataclass(frozen=True, eq=False)
class Survey(Rows):
    """What N conversations are in tokens, `(N,)` each.

    lengths: up to the last trained token
    prompts: before the first trained one
    ends:    whether the last trained token is an end token
    context: of the model, for all of them
    """

    lengths: torch.Tensor = dense()
    prompts: torch.Tensor = dense()
    ends: torch.Tensor = dense()
    context: int = shared()

    def kept(self, limit: TokenLimit) -> torch.Tensor:
        """The rows that are trained. ValueError for those that are too long where that is an error."""
        most = limit.within(self.context)
        over = self.lengths > most
        if limit.too_long == "error" and over.any():
            first = int(over.nonzero()[0, 0])
            raise ValueError(
                f"{int(over.sum())} of {len(self)} conversations have more than {limit.named(self.context)} tokens, "
                f"conversation {first + 1} has {int(self.lengths[first])}: shorten what is longer, or set data.limit="
                f"{{max_tokens: {most}, too_long: drop}} (or truncate)"
            )
        lost = self.prompts >= most if limit.too_long == "truncate" else over
        return (~lost).nonzero()[:, 0]


class ConversationEncoder(Remote):
    """Tokenizes for the policy that its siblings train."""

    def __init__(self, policy: Policy[ARStage], limit: TokenLimit) -> None:
        self._stage, self._limit = policy.stage, limit
        self._context = self._stage.family.context_length(self._stage.bundle)

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def survey(self, part: Part) -> Survey:
        """Their lengths; a conversation that the model cannot be shown is a ValueError."""
        rows = [self._tokens(conversation) for conversation in _conversations(part)]
        ends = self._stage.family.end_tokens(self._stage.bundle)
        return Survey(
            lengths=torch.tensor([row.length for row in rows]),
            prompts=torch.tensor([row.prompt for row in rows]),
            ends=torch.tensor([row.tokens[row.length - 1] in ends for row in rows]),
            context=self._context,
        )

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def encode(self, part: Part) -> Part:
        """A given Part with its targets: the response of a row starts at its first trained token."""
        rows = [self._tokens(conversation) for conversation in _conversations(part)]
        ends = [min(row.length, self._limit.within(self._context)) for row in rows]
        assert all(row.prompt < end for row, end in zip(rows, ends, strict=True)), "the survey drops what is too long"
        pairs = list(zip(rows, ends, strict=True))
        responses = [row.tokens[row.prompt : end] for row, end in pairs]
        flags = [row.trained[row.prompt : end] for row, end in pairs]
        tokens = torch.tensor([token for response in responses for token in response])
        segment = TextSegment(
            tokens=tokens,
            log_probs=torch.zeros(len(tokens)),
            loss_mask=torch.tensor([flag for row in flags for flag in row]),
            lengths=torch.tensor([len(response) for response in responses]),
            truncated=torch.tensor([end < row.length for row, end in pairs]),
        )
        return part.with_targets(segment=segment, conditions=_prompts(rows))

    def _tokens(self, conversation: Conversation) -> TrainedTokens:
        try:
            return self._stage.family.conversation(self._stage.bundle, conversation, self._limit.turns)
        except ValueError as error:
            text = conversation[0].text
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise ValueError(f"the conversation that starts with {shown!r}: {error}") from error


def _conversations(part: Part) -> list[Conversation]:
    assert part.media is not None, "a supervised part carries media"
    assert part.media.conversations is not None, "a language model is trained on conversations"
    return part.media.conversations


def _prompts(rows: list[TrainedTokens]) -> PromptTokens:
    pictures = [row.pictures or {} for row in rows]
    return PromptTokens(
        tokens=torch.tensor([token for row in rows for token in row.tokens[: row.prompt]]),
        lengths=torch.tensor([row.prompt for row in rows]),
        pictures=pictures if any(pictures) else None,
    )
