"""Requests to a server that may be busy, slow or gone: bounded in tries, time and size, failures with a cause."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import functools
import random
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

from unirl.config.environment import secret

T = TypeVar("T")

_LONGEST_PAUSE = 60.0
_KEPT_SECONDS = 2.0
_PASSING = (408, 425, 429)  # besides 5xx: answers that may be another one next time


class FailedTry(Exception):
    """Of one try. passing: another may go well, after `retry_after` seconds if the server says so."""

    def __init__(self, cause: str, *, passing: bool = False, retry_after: float | None = None) -> None:
        super().__init__(cause)
        self.passing, self.retry_after = passing, retry_after


@dataclasses.dataclass(frozen=True)
class Tries:
    """How often a request is sent; see `Chat` for the settings. deadline: of `time.monotonic()`."""

    tries: int
    pause: float
    seconds_per_try: float
    seconds_in_all: float
    deadline: float

    async def first_success(self, once: Callable[[int, float], Awaitable[T]], chance: random.Random) -> T:
        """What `once(attempt, seconds)` returns, attempts counted from 0; FailedTry where none returns."""
        for attempt in range(1, self.tries + 1):
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise FailedTry(f"not asked: the time for all messages, {self.seconds_in_all:g} s, is over")
            try:
                return await once(attempt - 1, min(left, self.seconds_per_try))
            except FailedTry as failed:
                cause = f"{failed} (try {attempt} of {self.tries})"
                if not failed.passing or attempt == self.tries:
                    raise FailedTry(cause) from failed
                pause = min(self.pause * 2 ** (attempt - 1), _LONGEST_PAUSE) * chance.uniform(0.5, 1)
                pause = pause if failed.retry_after is None else failed.retry_after
            if time.monotonic() + pause >= self.deadline:
                raise FailedTry(
                    f"{cause}; the next, in {pause:.3g} s, would be too late for the {self.seconds_in_all:g} s"
                )
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")


def check_tries(tries: int, concurrency: int, pause: float, seconds_per_try: float, seconds_in_all: float) -> None:
    """ValueError for settings that make no request."""
    if tries < 1 or concurrency < 1:
        raise ValueError(f"tries and concurrency must be at least 1, got {tries} and {concurrency}")
    if not (pause >= 0 and seconds_per_try > 0 and seconds_in_all > 0):
        raise ValueError(
            "pause must be at least 0, seconds_per_try and seconds_in_all above it, got "
            f"{pause}, {seconds_per_try} and {seconds_in_all}"
        )


def check_url(url: str, example: str) -> None:
    """ValueError for what is no URL of a server, or holds a secret."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("url holds a user or a password, which config.yaml would show: name a token_variable")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"url must read like {example}, got {url!r}")


def client(token_variable: str | None) -> httpx.AsyncClient:
    """A client with the token of that variable; proxies of the environment are not used, redirects not followed.

    It keeps connections for less time than servers do (uvicorn: 5 s), and so seldom uses one that is being closed.
    """
    # No compression: a small reply must not become a large one.
    headers = {"Accept-Encoding": "identity"}
    if token_variable is not None:
        headers["Authorization"] = f"Bearer {secret(token_variable)}"
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS)
    return httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=_certificates(), limits=limits)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes longer than a reply: once a process."""
    return httpx.create_ssl_context()


async def _sent(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """A kept connection may have been closed by the server meanwhile: then the request goes over another one."""
    made: list[str] = []

    async def trace(event: str, _about: Any) -> None:
        if event == "connection.connect_tcp.started":
            made.append(event)

    request.extensions["trace"] = trace
    while True:
        try:
            return await client.send(request, stream=True)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if made:
                raise


async def answer(client: httpx.AsyncClient, request: httpx.Request, seconds: float, most_bytes: int) -> bytes:
    """The body of a reply of status 200; FailedTry for any other, and for none."""
    try:
        async with asyncio.timeout(seconds):
            response = await _sent(client, request)
            try:
                content = await _limited(response, most_bytes)
            finally:
                await response.aclose()
    except TimeoutError:
        raise FailedTry(f"no reply within {seconds:.3g} s", passing=True) from None
    except httpx.RequestError as error:
        raise FailedTry(f"{type(error).__name__}: {error}", passing=True) from error
    content = _without_token(content, request)
    if response.status_code != httpx.codes.OK:
        passing = response.status_code in _PASSING or response.status_code >= 500
        cause = f"status {response.status_code}: {excerpt(content)}"
        raise FailedTry(cause, passing=passing, retry_after=_retry_after(response))
    return content


def excerpt(content: bytes) -> str:
    return repr(content[:300].decode(errors="replace"))


def _without_token(content: bytes, request: httpx.Request) -> bytes:
    """Servers repeat it when they refuse it."""
    if "authorization" not in request.headers:
        return content
    return content.replace(request.headers["authorization"].removeprefix("Bearer ").encode(), b"***")


async def _limited(response: httpx.Response, most_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > most_bytes:
            raise FailedTry(f"a reply of more than {most_bytes} bytes")
    return bytes(content)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds from now; None where the header is not there, or is neither a number nor a date."""
    if "retry-after" not in response.headers:
        return None
    value = response.headers["retry-after"].strip()
    if value.isascii() and value.isdigit():
        return float(value)
    date = email.utils.parsedate_tz(value)
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())
