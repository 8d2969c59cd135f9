"""Questions to a model behind an OpenAI-compatible URL: retried, bounded in time and size, failures with a cause."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import email.utils
import json
import random
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from unirl.config.environment import secret
from unirl.models.pictures import png

_MOST_BYTES = 1 << 20  # of a reply
_LONGEST_PAUSE = 60.0
_PASSING = (408, 425, 429)  # besides 5xx: answers that may be another one next time
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
        parts = urllib.parse.urlsplit(self.url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("url holds a user or a password, which config.yaml would show: name a token_variable")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url must read like http://127.0.0.1:8000/v1, got {self.url!r}")
        taken = sorted(set(_OURS) & set(self.request))
        if taken:
            raise ValueError(f"request must leave {taken} to Chat: model has a field of its own")
        if self.tries < 1 or self.concurrency < 1:
            raise ValueError(f"tries and concurrency must be at least 1, got {self.tries} and {self.concurrency}")
        if not (self.pause >= 0 and self.seconds_per_try > 0 and self.seconds_in_all > 0):
            raise ValueError(
                "pause must be at least 0, seconds_per_try and seconds_in_all above it, got "
                f"{self.pause}, {self.seconds_per_try} and {self.seconds_in_all}"
            )
        if self.token_variable is not None:
            secret(self.token_variable)

    def replies(self, messages: Sequence[Message]) -> list[str | NoReply]:
        """What the model replies to each message, in order, or why it does not. Each is a conversation of its own."""
        return asyncio.run(self._replies(messages))

    async def _replies(self, messages: Sequence[Message]) -> list[str | NoReply]:
        token = None if self.token_variable is None else secret(self.token_variable)
        # No compression: a small reply must not become a large one.
        headers = {"Accept-Encoding": "identity"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:
            slots, deadline = asyncio.Semaphore(self.concurrency), time.monotonic() + self.seconds_in_all
            call = _Call(self, client, slots, deadline, token)
            return await asyncio.gather(*(call.reply(message) for message in messages))


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the messages of one `Chat.replies` share."""

    chat: Chat
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    deadline: float
    token: str | None

    async def reply(self, message: Message) -> str | NoReply:
        async with self.slots:
            try:
                return await self._tried(message)
            except _Failed as failed:
                return NoReply(f"{self.chat.url}: {failed}")

    async def _tried(self, message: Message) -> str:
        chat, content = self.chat, _content(message)
        chance = random.Random(message if isinstance(message, str) else message.text)  # not the run's own
        for attempt in range(1, chat.tries + 1):
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise _Failed(f"not asked: the time for all messages, {chat.seconds_in_all:g} s, is over")
            try:
                return await self._once(content, min(left, chat.seconds_per_try))
            except _Failed as failed:
                cause = f"{failed} (try {attempt} of {chat.tries})"
                if not failed.passing or attempt == chat.tries:
                    raise _Failed(cause) from failed
                pause = min(chat.pause * 2 ** (attempt - 1), _LONGEST_PAUSE) * chance.uniform(0.5, 1)
                pause = pause if failed.retry_after is None else failed.retry_after
            if time.monotonic() + pause >= self.deadline:
                raise _Failed(
                    f"{cause}; the next, in {pause:.3g} s, would be too late for the {chat.seconds_in_all:g} s"
                )
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _once(self, content: Any, seconds: float) -> str:
        chat = self.chat
        body = {**chat.request, "model": chat.model, "messages": [{"role": "user", "content": content}]}
        try:
            async with (
                asyncio.timeout(seconds),
                self.client.stream("POST", f"{chat.url.rstrip('/')}/chat/completions", json=body) as response,
            ):
                reply = await _limited(response)
        except TimeoutError:
            raise _Failed(f"no reply within {seconds:.3g} s", passing=True) from None
        except httpx.RequestError as error:
            raise _Failed(f"{type(error).__name__}: {error}", passing=True) from error
        if self.token is not None:
            reply = reply.replace(self.token.encode(), b"***")  # servers repeat it when they refuse it
        status = response.status_code
        if status != httpx.codes.OK:
            passing = status in _PASSING or status >= 500
            raise _Failed(f"status {status}: {_excerpt(reply)}", passing=passing, retry_after=_retry_after(response))
        return _text(reply)


class _Failed(Exception):
    """Of one try. passing: another may go well, after `retry_after` seconds if the server says so."""

    def __init__(self, cause: str, *, passing: bool = False, retry_after: float | None = None) -> None:
        super().__init__(cause)
        self.passing, self.retry_after = passing, retry_after


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Of a message, as the protocol writes it."""
    if isinstance(message, str):
        return message
    urls = [f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}" for picture in message.pictures]
    shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*shown, {"type": "text", "text": message.text}]


async def _limited(response: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _MOST_BYTES:
            raise _Failed(f"a reply of more than {_MOST_BYTES} bytes")
    return bytes(content)


def _text(content: bytes) -> str:
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Failed(f"no chat completion: {_excerpt(content)}") from None
    if not isinstance(text, str):
        raise _Failed(f"a chat completion without text: {_excerpt(content)}")
    return text


def _excerpt(content: bytes) -> str:
    return repr(content[:300].decode(errors="replace"))


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds from now; None where the header is not there, or is neither a number nor a date."""
    if "retry-after" not in response.headers:
        return None
    value = response.headers["retry-after"].strip()
    if value.isascii() and value.isdigit():
        return float(value)
    date = email.utils.parsedate_tz(value)
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())
