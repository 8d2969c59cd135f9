"""A reward server as a run sees it: samples in chunks, each tried until it has a reply or its time is over."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import httpx

from unirl.config.environment import secret
from unirl.reward.http import protocol
from unirl.reward.http.connections import Connections
from unirl.reward.http.media import Malformed
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.reward.tries import FailedTry, Tries, answer, check_tries, check_url, excerpt

_MOST_BYTES = 1 << 24  # of a reply
_START_TRIES = 3  # a server that is not there when a run starts is a mistake in the recipe
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Server:
    """Reward servers that serve the same.

    urls:             such as `http://127.0.0.1:8080`; chunks go to them in turn, and a failed one to the next
    token_variable:   environment variable that holds the bearer token; None sends none
    tries, pause, seconds_per_try, seconds_in_all: as of a `Chat`; the defaults outlast a restart of a minute
    seconds_to_start: for the scorers of a server to be loaded when a run starts, and to leave or take their device
    concurrency:      requests at a time, from each worker
    chunk, chunk_mb:  samples and megabytes (2^20 bytes) of a request; a larger sample goes alone
    """

    urls: tuple[str, ...]
    token_variable: str | None = None
    tries: int = 8
    pause: float = 0.5
    seconds_per_try: float = 120.0
    seconds_in_all: float = 600.0
    seconds_to_start: float = 120.0
    concurrency: int = 4
    chunk: int = 16
    chunk_mb: int = 32

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls: name at least one server")
        for url in self.urls:
            check_url(url, "http://127.0.0.1:8080")
        check_tries(self.tries, self.concurrency, self.pause, self.seconds_per_try, self.seconds_in_all)
        if self.chunk < 1 or self.chunk_mb < 1:
            raise ValueError(f"chunk and chunk_mb must be at least 1, got {self.chunk} and {self.chunk_mb}")
        if not self.seconds_to_start > 0:
            raise ValueError(f"seconds_to_start must be positive, got {self.seconds_to_start}")
        if self.token_variable is not None:
            secret(self.token_variable)

    def version(self, scorer: str) -> str:
        """The version of `scorer` that all servers serve; ValueError, in seconds, where they do not."""
        return self._connections.run(lambda http: self._version(http, scorer))

    def scores(self, scorer: str, version: str, samples: list[ScorerInput]) -> list[float]:
        """A score per sample, in order, Unscored with its cause where there is none; never raises for a server."""
        return self._connections.run(lambda http: self._scores(http, scorer, version, samples))

    def sleep(self) -> None:
        """The scorers of all servers leave their device; RuntimeError, naming the server, where they do not."""
        self._connections.run(lambda http: self._residency(http, "offloaded"))

    def wake(self) -> None:
        """They take it again; RuntimeError as `sleep`."""
        self._connections.run(lambda http: self._residency(http, "resident"))

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        self._connections.close()

    @functools.cached_property
    def _connections(self) -> Connections:
        return Connections(self.token_variable)

    async def _residency(self, http: httpx.AsyncClient, state: Literal["resident", "offloaded"]) -> None:
        deadline = time.monotonic() + self.seconds_to_start
        tries = Tries(self.tries, self.pause, self.seconds_to_start, self.seconds_to_start, deadline)
        for url in self.urls:
            request = http.build_request("POST", f"{url.rstrip('/')}/v1/residency", json={"state": state})

            async def once(_attempt: int, seconds: float, request: httpx.Request = request) -> bytes:
                return await answer(http, request, seconds, _MOST_BYTES)

            try:
                await tries.first_success(once, random.Random(url))
            except FailedTry as failed:
                raise RuntimeError(f"the scorers of reward server {url} are not {state}: {failed}") from failed

    async def _version(self, http: httpx.AsyncClient, scorer: str) -> str:
        versions: dict[str, str] = {}
        for url in self.urls:
            try:
                served = await self._served(http, url)
            except FailedTry as failed:
                raise ValueError(f"reward server {url} does not serve {scorer!r}: {failed}") from failed
            if scorer not in served:
                raise ValueError(f"reward server {url} does not serve {scorer!r}, it serves {sorted(served)}")
            versions[url] = served[scorer]
        if len(set(versions.values())) > 1:
            raise ValueError(f"the reward servers serve different versions of {scorer!r}: {versions}")
        return versions[self.urls[0]]

    async def _served(self, http: httpx.AsyncClient, url: str) -> dict[str, str]:
        """Versions by scorer, when all of them are loaded."""
        deadline = time.monotonic() + self.seconds_to_start
        tries = Tries(_START_TRIES, self.pause, self.seconds_per_try, self.seconds_to_start, deadline)
        request = http.build_request("GET", f"{url.rstrip('/')}/v1/scorers")

        async def once(_attempt: int, seconds: float) -> tuple[bool, dict[str, str]]:
            return _listing(await answer(http, request, seconds, _MOST_BYTES))

        while True:
            ready, served = await tries.first_success(once, random.Random(url))
            if ready:
                return served
            if time.monotonic() >= deadline:
                raise FailedTry(f"its scorers are still loading after {self.seconds_to_start:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def _scores(
        self, http: httpx.AsyncClient, scorer: str, version: str, samples: list[ScorerInput]
    ) -> list[float]:
        scores: dict[int, float] = {}
        call = _Call(self, scorer, version, time.monotonic() + self.seconds_in_all)
        slots = asyncio.Semaphore(self.concurrency)
        async with asyncio.TaskGroup() as tasks:

            async def ask(number: int, chunk: dict[int, bytes]) -> None:
                try:
                    scores.update(await call.chunk(http, number, chunk))
                finally:
                    slots.release()

            for number, chunk in enumerate(self._chunks(samples, scores)):
                await slots.acquire()  # so that no more chunks are packed than are on their way
                tasks.create_task(ask(number, chunk))
        return [scores[row] for row in range(len(samples))]

    def _chunks(self, samples: list[ScorerInput], scores: dict[int, float]) -> Iterator[dict[int, bytes]]:
        """Packed items by row; a sample that cannot be packed gets its cause in `scores`."""
        chunk, size = dict[int, bytes](), 0
        for row, sample in enumerate(samples):
            try:
                packed = protocol.item(row, sample)
            except ValueError as error:
                scores[row] = Unscored(str(error))
                continue
            if chunk and (len(chunk) == self.chunk or size + len(packed) > self.chunk_mb * 2**20):
                yield chunk
                chunk, size = {}, 0
            chunk[row] = packed
            size += len(packed)
        if chunk:
            yield chunk


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the chunks of one `Server.scores` share."""

    server: Server
    scorer: str
    version: str
    deadline: float

    async def chunk(self, http: httpx.AsyncClient, number: int, packed: dict[int, bytes]) -> dict[int, float]:
        server, ids = self.server, [str(row) for row in packed]
        tries = Tries(server.tries, server.pause, server.seconds_per_try, server.seconds_in_all, self.deadline)
        parts, urls = protocol.request(self.scorer, list(packed.values())), server.urls
        headers = {
            "Content-Type": protocol.MEDIA_TYPE,
            "Content-Length": str(sum(map(len, parts))),
            protocol.KEY_HEADER: uuid.uuid4().hex,
        }

        async def once(attempt: int, seconds: float) -> list[float]:
            url = urls[(number + attempt) % len(urls)]
            request = http.build_request("POST", f"{url.rstrip('/')}/v1/score", content=_Parts(parts), headers=headers)
            try:
                content = await answer(http, request, seconds, _MOST_BYTES)
                return protocol.parsed_reply(content, self.scorer, self.version, ids)
            except protocol.OtherVersion as other:
                raise FailedTry(f"{url}: {other}") from other
            except Malformed as malformed:
                raise FailedTry(f"{url}: {malformed}", passing=True) from malformed
            except FailedTry as failed:
                raise FailedTry(f"{url}: {failed}", passing=failed.passing, retry_after=failed.retry_after) from failed

        try:
            scores = await tries.first_success(once, random.Random(f"{self.scorer} {number}"))
        except FailedTry as failed:
            scores = [Unscored(str(failed)) for _ in ids]
        return dict(zip(packed, scores, strict=True))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A body that can be sent again."""

    parts: list[bytes]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part


def _listing(content: bytes) -> tuple[bool, dict[str, str]]:
    try:
        listing = json.loads(content)
        versions = {name: about["version"] for name, about in listing["scorers"].items()}
        spoken, ready = listing["protocol"], listing["ready"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise FailedTry(f"no list of scorers: {excerpt(content)}") from None
    if spoken != protocol.PROTOCOL:
        raise FailedTry(f"it speaks protocol {spoken!r}, this side {protocol.PROTOCOL}")
    return ready is True, versions
