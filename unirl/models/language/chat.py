"""Which part of a rendered conversation the assistant wrote, in characters and in tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unirl.models.language.trained import TrainedTokens
from unirl.types.conversation import Conversation, Message, Turns

# Messages, and whether the assistant's turn is opened behind them, as text.
Render = Callable[[list[dict[str, Any]], bool], str]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RewrittenTurnsError(ValueError):
    """The chat template renders a turn differently once others follow it."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """text; spans: the characters `[start, end)` of each turn of the assistant that is trained"""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template with the settings of a family: its system message, and arguments of the template."""

    tokenizer: Any
    system: str | None
    arguments: Mapping[str, bool | int | float | str]

    def opened(self, messages: Conversation) -> list[int]:
        """The tokens of a conversation in which the assistant is about to speak."""
        mappings = [as_mapping(message) for message in self._with_system(messages)]
        return self.tokenizer(self._render(mappings, True), add_special_tokens=False)["input_ids"]

    def trained(self, messages: Conversation, turns: Turns, ends: Iterable[int]) -> TrainedTokens:
        """The tokens of a conversation to learn from; ends: end tokens."""
        messages = self._with_system(messages)
        try:
            whole = rendered(self._render, messages, turns)
        except RewrittenTurnsError:
            marked = marked_tokens(self.tokenizer, messages, turns, ends, **self.arguments)
            if marked is None:
                raise
            return marked
        return trained_tokens(self.tokenizer, whole, ends)

    def _with_system(self, messages: Conversation) -> Conversation:
        """A system message of the conversation's own comes before that of the settings."""
        given = self.system is None or messages[0].role == "system"
        return messages if given else (Message("system", (self.system or "",)), *messages)

    def _render(self, messages: list[dict[str, Any]], opening: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=opening, tokenize=False, **self.arguments
        )


def rendered(render: Render, messages: Conversation, turns: Turns) -> Rendered:
    """The conversation by its chat template.

    A turn of the assistant is what comes after the opening of the turn (as a rollout would start from it), up to the
    end of the rendering with it. ValueError where that does not come out of the whole: RewrittenTurnsError where the
    template changes a turn once others follow it (strips its reasoning), so that no rollout would ever see the whole.
    """
    from jinja2 import TemplateError

    mappings = [as_mapping(message) for message in messages]
    own = [number for number, message in enumerate(messages) if message.role == "assistant"]
    spans = []
    try:
        whole = render(mappings[: own[-1] + 1], False)
        for number in own if turns == "all" else own[-1:]:
            opening, closed = render(mappings[:number], True), render(mappings[: number + 1], False)
            if not closed.startswith(opening) or not whole.startswith(closed):
                raise RewrittenTurnsError(
                    f"the chat template renders turn {number + 1} differently by itself and in the whole conversation "
                    "(some strip the reasoning of earlier turns): train the last turn only (data.limit.turns=last), or "
                    "take a template that marks the assistant's tokens with {% generation %}"
                )
            _refuse_loss(messages[number], closed[len(opening) :])
            for field in messages[number].said:
                if closed == _rendered_without(field, render, mappings[: number + 1]):
                    raise ValueError(_left_out(f"{field} of the assistant's turn {number + 1}"))
            spans.append((len(opening), len(closed)))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation ({error})") from error
    return Rendered(whole, tuple(spans))


def as_mapping(message: Message) -> dict[str, Any]:
    """A turn as chat templates read it; with pictures, its content is a list."""
    if not message.pictures:
        return {"role": message.role, "content": message.text, **message.fields}
    content = [
        {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image", "image": str(piece)}
        for piece in message.content
    ]
    return {"role": message.role, "content": content, **message.fields}


def trained_tokens(tokenizer: Any, whole: Rendered, ends: Iterable[int]) -> TrainedTokens:
    """The tokens of a rendered conversation.

    ends: end tokens: what a template puts behind the one of a turn is not the assistant's
    """
    tokens, trained = _flagged(tokenizer, whole, special=False)
    return TrainedTokens(tokens, up_to_end_tokens(tokens, trained, frozenset(ends)))


def plain_tokens(tokenizer: Any, messages: Conversation, end: int) -> TrainedTokens:
    """The tokens of a prompt and its response without a chat template; end: what the response ends with."""
    tokens, trained = _flagged(tokenizer, plain(messages), special=True)
    if tokens[-1:] == [end]:  # a tokenizer may close each text by itself
        tokens, trained = tokens[:-1], trained[:-1]
    return TrainedTokens([*tokens, end], [*trained, True])


def plain(messages: Conversation) -> Rendered:
    """A prompt and its response as they stand, one behind the other."""
    roles = [message.role for message in messages]
    fields = sorted({field for message in messages for field in message.fields})
    if fields:
        raise ValueError(f"without a chat template a turn is its text alone, and {fields} would be left out")
    if roles != ["user", "assistant"]:
        raise ValueError(f"without a chat template a conversation is a prompt and its response, got the turns {roles}")
    prompt, response = (message.text for message in messages)
    return Rendered(prompt + response, ((len(prompt), len(prompt) + len(response)),))


def marked_tokens(
    tokenizer: Any, messages: Conversation, turns: Turns, ends: Iterable[int], **arguments: Any
) -> TrainedTokens | None:
    """By the marks of the template; None where it has none."""
    if _GENERATION.search(tokenizer.chat_template) is None:
        return None
    encoded = tokenizer.apply_chat_template(
        [as_mapping(message) for message in messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
        **arguments,
    )
    trained = [bool(flag) for flag in encoded["assistant_masks"]]
    if turns == "last" and True in trained:
        last = len(trained) - trained[::-1].index(True)
        first = last - next((back for back, flag in enumerate(trained[:last][::-1]) if not flag), last)
        trained = [first <= place < last for place in range(len(trained))]
    return TrainedTokens(encoded["input_ids"], up_to_end_tokens(encoded["input_ids"], trained, frozenset(ends)))


def up_to_end_tokens(tokens: list[int], trained: list[bool], ends: frozenset[int]) -> list[bool]:
    """`trained` without what follows the last end token of each unbroken stretch that holds one."""
    kept, place = list(trained), 0
    while place < len(tokens):
        stop = place
        while stop < len(tokens) and trained[stop]:
            stop += 1
        closing = [at for at in range(place, stop) if tokens[at] in ends]
        if closing:
            kept[closing[-1] + 1 : stop] = [False] * (stop - closing[-1] - 1)
        place = stop + 1
    return kept


def _flagged(tokenizer: Any, whole: Rendered, *, special: bool) -> tuple[list[int], list[bool]]:
    """Tokens, and whether each is of a trained turn. special: with what the tokenizer adds to a text by itself."""
    cuts = sorted({end for span in whole.spans for end in span})
    tokens, starts = _tokens(tokenizer, whole.text, cuts, special)
    return tokens, [any(a <= start < b for a, b in whole.spans) for start in starts]


def _tokens(tokenizer: Any, text: str, cuts: list[int], special: bool) -> tuple[list[int], list[int]]:
    """Ids and the character where each one starts. No token crosses a cut: a rollout would start from its left side."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens stand: take a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    crossed = next((cut for cut in cuts if any(start < cut < end for start, end in spans)), None)
    if crossed is None:
        return encoded["input_ids"], [start for start, _ in spans]
    left = _tokens(tokenizer, text[:crossed], [cut for cut in cuts if cut < crossed], special)
    right = _tokens(tokenizer, text[crossed:], [cut - crossed for cut in cuts if cut > crossed], False)
    return left[0] + right[0], left[1] + [start + crossed for start in right[1]]


def _refuse_loss(message: Message, turn: str) -> None:
    if "".join(message.text.split()) not in "".join(turn.split()):  # templates set blanks as they like
        shown = message.text if len(message.text) <= 60 else f"{message.text[:60]}..."
        raise ValueError(_left_out(f"a part of the assistant's turn {shown!r}, such as its reasoning"))


def _rendered_without(field: str, render: Render, mappings: list[dict[str, Any]]) -> str | None:
    """The conversation without this field of its last turn; None where the template insists on it."""
    from jinja2 import TemplateError

    last = {key: value for key, value in mappings[-1].items() if key != field}
    try:
        return render([*mappings[:-1], last], False)
    except TemplateError:
        return None


def _left_out(part: str) -> str:
    return (
        f"the chat template leaves out {part}: it would not be learnt; take another template, or leave that part out "
        "of the data"
    )
