"""Conversations, encoded for the small language model that `tests.tiny_language` has."""

from __future__ import annotations

from unirl.data.conversations import as_conversations
from unirl.rollout.supervised_text import ConversationEncoder, TokenLimit
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.conversation import Conversation, Message
from unirl.types.sample import Part

PAIRS = (("1+1=", "2"), ("sort 312:", "123"), ("a", "bcdefgh"), ("1+1=", "two"), ("hello? ", "a longer response."))


def conversations(*pairs: tuple[str, str]) -> tuple[Conversation, ...]:
    return tuple((Message("user", (prompt,)), Message("assistant", (response,))) for prompt, response in pairs)


def encoded(backend: FSDPBackend, *pairs: tuple[str, str], limit: TokenLimit | None = None) -> Part:
    """The pairs (PAIRS unless given) as a Part with targets."""
    encoder = ConversationEncoder(backend, limit or TokenLimit())
    return encoder.encode(as_conversations(conversations(*(pairs or PAIRS)), 0))
