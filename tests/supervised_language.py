"""A language model that trains in milliseconds, and conversations encoded for it."""

from __future__ import annotations

from typing import Any

import torch

from unirl.data.conversations import as_conversations
from unirl.models.tiny_language import TinyLM
from unirl.rollout.supervised_text import ConversationEncoder, TokenLimit
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.optim import AdamW
from unirl.types.conversation import Conversation, Message
from unirl.types.sample import Part
from unirl.types.segment import TextSegment

SMALL = TinyLM(layers=2, width=32, heads=4)
# With beta1 = 0 the first moment of AdamW is the gradient of the last step.
PLAIN = AdamW(lr=1e-3, betas=(0.0, 0.999))
PAIRS = (("1+1=", "2"), ("sort 312:", "123"), ("a", "bcdefgh"), ("1+1=", "two"), ("hello? ", "a longer response."))


def policy(**settings: Any) -> FSDPBackend:
    """A backend on the CPU that does not clip."""
    config = ARBackendConfig(**{"optimizer": PLAIN, "max_grad_norm": None, **settings})
    return FSDPBackend(SMALL, config, device=torch.device("cpu"), seed=0, total_steps=100, with_reference=False)


def conversations(*pairs: tuple[str, str]) -> tuple[Conversation, ...]:
    return tuple((Message("user", (prompt,)), Message("assistant", (response,))) for prompt, response in pairs)


def encoded(backend: FSDPBackend, *pairs: tuple[str, str], limit: TokenLimit | None = None) -> Part:
    """The pairs (PAIRS unless given) as a Part with targets."""
    encoder = ConversationEncoder(backend, limit or TokenLimit())
    return encoder.encode(as_conversations(conversations(*(pairs or PAIRS)), 0))


def responses(part: Part) -> TextSegment:
    assert isinstance(part.segment, TextSegment)
    return part.segment


def last_gradient(backend: FSDPBackend) -> torch.Tensor:
    """The gradient of the last optimizer step, all parameters end to end (see PLAIN)."""
    moments = backend.state()["optimizer"]
    return torch.cat([moments[name]["exp_avg"].flatten() for name in sorted(moments)])
