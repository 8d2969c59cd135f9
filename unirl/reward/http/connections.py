"""Connections to servers that outlast a call: making them costs as much as a small reply."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from unirl.reward.tries import client

T = TypeVar("T")

_END_SECONDS = 5


class Connections:
    """One client, on an event loop in a thread of its own, from the first call on. Any thread may call.

    A copy, as a pickle or a forked process makes one, has connections of its own.
    """

    def __init__(self, token_variable: str | None) -> None:
        self._token_variable = token_variable
        self._lock = threading.Lock()
        self._line: _Line | None = None

    def __reduce__(self) -> tuple[type[Connections], tuple[str | None]]:
        return Connections, (self._token_variable,)

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """What `work(client)` returns."""
        with self._lock:
            if self._line is None or self._line.process != os.getpid():
                self._line = _Line(self._token_variable)
            line = self._line
        call = asyncio.run_coroutine_threadsafe(work(line.client), line.loop)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def close(self) -> None:
        """Close them; the next call makes new ones."""
        with self._lock:
            line, self._line = self._line, None
        if line is not None and line.process == os.getpid():
            line.end()
            line.thread.join(_END_SECONDS)


class _Line:
    """A running loop and its client. `end`, at the latest when it is forgotten, closes both."""

    def __init__(self, token_variable: str | None) -> None:
        self.process = os.getpid()
        self.client = client(token_variable)
        self.loop = asyncio.new_event_loop()
        # A daemon: a program that ends does not wait for what a server still has to say.
        self.thread = threading.Thread(target=_serve, args=(self.loop, self.client), daemon=True)
        self.thread.start()
        self.end = weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)


def _serve(loop: asyncio.AbstractEventLoop, own: httpx.AsyncClient) -> None:
    loop.run_forever()
    loop.run_until_complete(own.aclose())
    loop.close()
