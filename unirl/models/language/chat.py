"""Which part of a rendered conversation the assistant wrote, in characters and in tokens."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unirl.models.language.trained import TrainedTokens
from unirl.types.conversation import Conversation, Message, Turns

# Messages, and whether the assistant's turn is opened behind them, as text.
Render = Callable[[list[dict[str, Any]], bool], str]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RewrittenTurnsError(ValueError):
    """The chat template renders a turn as no rollout would: otherwise than it opens it, or once others follow it."""


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
        return _ids(self.tokenizer, self._render(mappings, True))

    def trained(self, messages: Conversation, turns: Turns, ends: Iterable[int]) -> TrainedTokens:
        """The tokens of a conversation to learn from; ends: end tokens."""
        messages = up_to_last_answer(self._with_system(messages))
        try:
            whole = rendered(self._render, messages, turns)
        except RewrittenTurnsError:
            whole = self._marked(messages, turns)
            if whole is None:
                raise
        tokens, trained = _flagged(self.tokenizer, whole)
        # What a template puts behind the end token of a turn is not the assistant's.
        return TrainedTokens(tokens, up_to_end_tokens(tokens, trained, frozenset(ends)))

    def _with_system(self, messages: Conversation) -> Conversation:
        """A system message of the conversation's own comes before that of the settings."""
        given = self.system is None or messages[0].role == "system"
        return messages if given else (Message("system", (self.system or "",)), *messages)

    def _render(self, messages: list[dict[str, Any]], opening: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=opening, tokenize=False, **self.arguments
        )

    def _marked(self, messages: Conversation, turns: Turns) -> Rendered | None:
        """By the marks of the template; None where it has none."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template()
        if _GENERATION.search(template) is None:
            return None
        found: Any = render_jinja_template(
            conversations=[[as_mapping(message) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.arguments},
        )
        [text], [marks] = found
        spans = list[tuple[int, int]]()
        for start, end in marks:
            touching = bool(spans) and spans[-1][1] == start  # a turn may have several marks
            spans.append((spans.pop()[0] if touching else start, end))
        return Rendered(text, tuple(spans if turns == "all" else spans[-1:]))


def up_to_last_answer(messages: Conversation) -> Conversation:
    """Without the turns that follow the last one of the assistant: templates look at what comes last."""
    own = [number for number, message in enumerate(messages) if message.role == "assistant"]
    return messages[: own[-1] + 1]


def rendered(render: Render, messages: Conversation, turns: Turns) -> Rendered:
    """A conversation that ends with an answer, by its chat template.

    A turn of the assistant is what comes after the opening of the turn (as a rollout would start from it), up to the
    end of the rendering with it. ValueError where that does not come out of the whole: RewrittenTurnsError where the
    template changes a turn once others follow it, or leaves out what it opens the turn with (strips its reasoning), so
    that no rollout would ever see the whole.
    """
    from jinja2 import TemplateError

    mappings = [as_mapping(message) for message in messages]
    own = [number for number, message in enumerate(messages) if message.role == "assistant"]
    spans = []
    try:
        whole = render(mappings, False)
        for number in own if turns == "all" else own[-1:]:
            opening, closed = render(mappings[:number], True), render(mappings[: number + 1], False)
            if not closed.startswith(opening):
                lost = next(opening[at:] for at in reversed(range(len(opening))) if closed.startswith(opening[:at]))
                raise RewrittenTurnsError(
                    f"the chat template opens a turn of the assistant with {lost!r} and renders turn {number + 1} "
                    "without it, so no rollout would see that turn: take a template that keeps the reasoning of the "
                    f"data, or, where the data has none, let its answers start with {lost!r} or set "
                    "model.template_arguments by which it is not opened (such as enable_thinking)"
                )
            if not whole.startswith(closed):
                raise RewrittenTurnsError(
                    f"the chat template renders turn {number + 1} differently by itself and in the whole conversation "
                    "(some strip the reasoning of earlier turns): train the last turn only (data.limit.turns=last), or "
                    "take a template that marks the assistant's tokens with {% generation %}"
                )
            # The answer may start with what the template opens its turn with, such as <think>.
            _refuse_loss(messages[number], closed[max(len(opening) - len(messages[number].text), 0) :])
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


def plain_prompt(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt without a chat template."""
    return [*_opening(tokenizer), *_ids(tokenizer, text)]


def plain_tokens(tokenizer: Any, messages: Conversation, end: int) -> TrainedTokens:
    """The tokens of a prompt and its response without a chat template; end: what the response ends with, once."""
    tokens, trained = _flagged(tokenizer, plain(messages))
    if True not in trained or tokens[-1] != end:
        tokens, trained = [*tokens, end], [*trained, True]
    opening = _opening(tokenizer)
    return TrainedTokens([*opening, *tokens], [False] * len(opening) + trained)


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


def _flagged(tokenizer: Any, whole: Rendered) -> tuple[list[int], list[bool]]:
    """Tokens, and whether each is of a trained turn. None crosses the start of one: a rollout writes from there."""
    cuts = sorted({0, len(whole.text), *(edge for span in whole.spans for edge in span)})
    tokens, trained, before = list[int](), list[bool](), ""
    for start, end in itertools.pairwise(cuts):
        text = whole.text[start:end]
        piece = _behind(tokenizer, before, text)
        tokens += piece
        trained += [any(a <= start < b for a, b in whole.spans)] * len(piece)
        before = text
    return tokens, trained


def _behind(tokenizer: Any, before: str, text: str) -> list[int]:
    """The tokens of `text` behind those of `before`: of both together where they begin with those of `before`.

    Where a token of both would cross the border, they are those that read as both together do; ValueError without any.
    """
    own, both = _ids(tokenizer, before), _ids(tokenizer, before + text)
    if both[: len(own)] == own:
        return both[len(own) :]
    wanted = _read(tokenizer, both)
    # Some tokenizers put a blank before the start of a text: behind a line break it is no start.
    for anchor in ("", "\n"):
        known, found = _ids(tokenizer, anchor), _ids(tokenizer, anchor + text)
        piece = found[len(known) :]
        if found[: len(known)] == known and _read(tokenizer, own + piece) == wanted:
            return piece
    raise ValueError(
        f"the tokenizer has no tokens for {text[:20]!r} behind a prompt that ends in {before[-20:]!r}: a rollout that "
        "starts from this prompt would never write it; end the prompt with a blank or a line break, or start the "
        "response with one"
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _read(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def _opening(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text, such as a begin token; what it puts behind one would end a prompt."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [token for token, _ in itertools.takewhile(lambda pair: pair[1], pairs)]


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
