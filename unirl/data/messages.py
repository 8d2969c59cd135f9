"""One row of data as a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from unirl.types.conversation import Conversation, Message, Role

_ROLES = get_args(Role)
# What chat templates read of a turn beside its role and content.
_FIELDS = frozenset({"name", "reasoning_content", "tool_call_id", "tool_calls"})


def conversation_of(record: dict[str, Any], folder: Path) -> Conversation:
    """`{"prompt": text, "response": text}` or `{"messages": [...]}` as a conversation; others are left.

    A turn is `{"role", "content"}`, whose content is text, or a list of `{"type": "text", "text": ...}` and
    `{"type": "image", "image": file in folder}`. ValueError, with the reason first, for what is none.
    """
    given = {key: value for key, value in record.items() if value is not None}
    if "tools" in given:
        raise ValueError("the row has 'tools', which are not passed to chat templates: describe them in a system turn")
    match given:
        case {"messages": _, "prompt": _} | {"messages": _, "response": _}:
            raise ValueError("the row has both 'messages' and 'prompt' or 'response'")
        case {"messages": [_, *_] as turns}:
            messages = tuple(_message(turn, folder) for turn in turns)
        case {"prompt": str(prompt), "response": str(response)}:
            messages = (Message("user", (prompt,)), Message("assistant", (response,)))
        case _:
            found = {key: type(value).__name__ for key, value in sorted(record.items())}
            raise ValueError(f"a row has strings 'prompt' and 'response', or a list 'messages' (got {found})")
    _refuse_order(messages)
    _refuse_silence(messages)
    return messages


def _refuse_order(messages: Conversation) -> None:
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise ValueError(f"no turn is the assistant's: there is nothing to learn (roles: {roles})")
    if roles[0] == "assistant":
        raise ValueError(f"the first turn is the assistant's: it answers nothing (roles: {roles})")
    if "system" in roles[1:]:
        raise ValueError(f"a system turn comes first (roles: {roles})")
    if messages[0].role == "user" and len(messages[0].content) == 1 and messages[0].content[0] == "":
        raise ValueError("the prompt is empty")


def _refuse_silence(messages: Conversation) -> None:
    silent = [message for message in messages if message.role == "assistant" and message.empty]
    if silent:
        raise ValueError("a turn of the assistant is empty: there is nothing to learn from it but its end")


def _message(turn: Any, folder: Path) -> Message:
    match turn:
        case {"role": ("system" | "user" | "assistant" | "tool") as role, **others}:
            content = others.pop("content", None)
            fields = {key: value for key, value in others.items() if value is not None}
        case {"role": role}:
            raise ValueError(f"the role of a turn is one of {', '.join(_ROLES)} (got {role!r})")
        case _:
            raise ValueError(f"a turn is an object with 'role' and 'content' (got {turn!r})")
    unknown = sorted(set(fields) - _FIELDS)
    if unknown:
        raise ValueError(f"a turn has keys that no chat template reads ({unknown}; known: {sorted(_FIELDS)})")
    if content is None and "tool_calls" not in fields:
        raise ValueError(f"a turn without 'content' needs 'tool_calls' (role {role})")
    return Message(role, _content(content, folder), fields)


def _content(content: Any, folder: Path) -> tuple[str | Path, ...]:
    match content:
        case None:
            return ()
        case str():
            return (content,)
        case list():
            return tuple(_piece(piece, folder) for piece in content)
        case _:
            raise ValueError(f"the content of a turn is text or a list (got {type(content).__name__})")


def _piece(piece: Any, folder: Path) -> str | Path:
    # Columns of Parquet hold all keys in all rows: those that a piece lacks are null there.
    given = {key: value for key, value in piece.items() if value is not None} if isinstance(piece, dict) else piece
    match given:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image", "image": str(name)}:
            if not (folder / name).is_file():
                raise ValueError(f"there is no such picture ({name} in {folder})")
            return folder / name
        case _:
            raise ValueError(f"a piece of content is a text, or an image with its file name (got {given!r})")
