"""Questions to a model behind an OpenAI-compatible URL: retried, bounded in time and size, failures with a cause."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from unirl.config.environment import secret
from unirl.models.pictures import png
from unirl.reward.tries import FailedTry, Tries, answer, check_tries, check_url, client, excerpt

_MOST_BYTES = 1 << 20  # of a reply
_OURS = ("messages", "model", "n", "stream")


@dataclasses.dataclass(frozen=True)
class NoReply:
    """Why a message has no reply."""

    cause: str


@dataclasses.dataclass(frozen=True, eq=False)
class Illustrated:
    """A message with pictures `(H, W, 3)` uint8, which are sent as PNG and stand before its text."""

    text: str
    pictures: tuple[np.ndarray, ...]


Message = str | Illustrated


@dataclasses.dataclass(frozen=True)
class Chat:
    """An endpoint.

    url:             what stands before `/chat/completions`, such as `http://127.0.0.1:8000/v1`
    request:         the other fields of the request, as the server takes them
    token_variable:  environment variable that holds the bearer token; None sends none
    tries:           of one message: again after 408, 425, 429, 5xx and a failed or slow connection, never after others
    pause:           seconds before the second try, twice as many before each further one, less up to half by chance;
                     a Retry-After of the server takes its place
    seconds_per_try: for a whole reply
    seconds_in_all:  for all messages of a call
    concurrency:     requests at a time, from each worker

    Proxies of the environment are not used, redirects not followed.
    """

    url: str
    model: str
    request: dict[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0, "max_tokens": 512})
    token_variable: str | None = None
    tries: int = 4
    pause: float = 1.0
    seconds_per_try: float = 60.0
    seconds_in_all: float = 600.0
    concurrency: int = 16

    def __post_init__(self) -> None:
        check_url(self.url, "http://127.0.0.1:8000/v1")
        taken = sorted(set(_OURS) & set(self.request))
        if taken:
            raise ValueError(f"request must leave {taken} to Chat: model has a field of its own")
        check_tries(self.tries, self.concurrency, self.pause, self.seconds_per_try, self.seconds_in_all)
        if self.token_variable is not None:
            secret(self.token_variable)

    def replies(self, messages: Sequence[Message]) -> list[str | NoReply]:
        """What the model replies to each message, in order, or why it does not. Each is a conversation of its own."""
        return asyncio.run(self._replies(messages))

    async def _replies(self, messages: Sequence[Message]) -> list[str | NoReply]:
        async with client(self.token_variable) as http:
            call = _Call(self, http, asyncio.Semaphore(self.concurrency), time.monotonic() + self.seconds_in_all)
            return await asyncio.gather(*(call.reply(message) for message in messages))


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the messages of one `Chat.replies` share."""

    chat: Chat
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    deadline: float

    async def reply(self, message: Message) -> str | NoReply:
        chat = self.chat
        chance = random.Random(message if isinstance(message, str) else message.text)  # not the run's own
        tries = Tries(chat.tries, chat.pause, chat.seconds_per_try, chat.seconds_in_all, self.deadline)

        async with self.slots:
            # In its turn: of many messages, only those under way are held with their pictures.
            body = {**chat.request, "model": chat.model, "messages": [{"role": "user", "content": _content(message)}]}
            request = self.client.build_request("POST", f"{chat.url.rstrip('/')}/chat/completions", json=body)

            async def once(_attempt: int, seconds: float) -> str:
                return _text(await answer(self.client, request, seconds, _MOST_BYTES))

            try:
                return await tries.first_success(once, chance)
            except FailedTry as failed:
                return NoReply(f"{chat.url}: {failed}")


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Of a message, as the protocol writes it."""
    if isinstance(message, str):
        return message
    urls = [f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}" for picture in message.pictures]
    shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*shown, {"type": "text", "text": message.text}]


def _text(content: bytes) -> str:
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise FailedTry(f"no chat completion: {excerpt(content)}") from None
    if not isinstance(text, str):
        raise FailedTry(f"a chat completion without text: {excerpt(content)}")
    return text
