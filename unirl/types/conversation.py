"""A conversation: what supervised training of a language model is given, a turn at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Turns = Literal["all", "last"]  # of the assistant, that are trained
_SAID = ("reasoning_content", "tool_calls")


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn.

    content: texts and picture files in their order
    fields:  what else a chat template may read of the turn, such as `tool_calls`
    """

    role: Role
    content: tuple[str | Path, ...]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """All that is text."""
        return "".join(piece for piece in self.content if isinstance(piece, str))

    @property
    def pictures(self) -> tuple[Path, ...]:
        """All that is pictures."""
        return tuple(piece for piece in self.content if isinstance(piece, Path))

    @property
    def said(self) -> tuple[str, ...]:
        """The fields, where there are any, in which the assistant says something beside the content."""
        return tuple(name for name in _SAID if self.fields.get(name))

    @property
    def empty(self) -> bool:
        """Whether it says nothing at all."""
        return not (self.text.strip() or self.pictures or self.said)


Conversation = tuple[Message, ...]
