"""The end points of a reward server.

    POST /v1/score      protocol.py
    GET  /v1/scorers    what is served, with versions
    POST /v1/selftest   the examples once more
    GET  /v1/residency  {state: loading | resident | offloaded}        POST {state: resident | offloaded}
    GET  /healthz       the process is alive         GET /readyz   every scorer can be asked, or why not
    GET  /metrics       Prometheus

400: malformed. 401: the token. 404: no such scorer. 408: too slow. 413: too large. 415: neither msgpack nor JSON.
422: the key of another request. 429 and 503, with Retry-After: full; loading, offloaded, stuck or stopping.
504: a batch takes too long. A sample that fails is an error in a reply of status 200.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator
from typing import get_args

import prometheus_client
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from unirl.config.environment import secret
from unirl.reward.http import protocol
from unirl.reward.http.batching import Batch, Closed, Overdue, QueueFull, Stuck
from unirl.reward.http.config import ServeConfig
from unirl.reward.http.fleet import Fleet, NotReady, Residency, described
from unirl.reward.http.media import Malformed, TooLarge
from unirl.reward.scorer import ScorerInput

_log = logging.getLogger(__name__)
_BODY_SECONDS = 120  # for a request to arrive
_END_SECONDS = 5  # for replies on their way when the server stops
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_AGAIN = {"Retry-After": "1"}


def listening_socket(config: ServeConfig) -> socket.socket:
    """OSError where the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family)
    # Its connections inherit it; without, every reply but the first of a connection waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class RewardServer:
    """Serves `config` on a listening socket, until `stop` or a signal."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.failure: str | None = None
        self._figures = _Figures()
        self._fleet = Fleet(config, self._figures.count)
        self._replies: collections.OrderedDict[str, tuple[object, asyncio.Task[bytes]]] = collections.OrderedDict()
        self._token = None if config.token_variable is None else f"Bearer {secret(config.token_variable)}".encode()
        settings = uvicorn.Config(
            self._app(), log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=_END_SECONDS
        )
        self._uvicorn = uvicorn.Server(settings)

    def run(self, listener: socket.socket) -> None:
        """Returns when it has ended; `failure` then says why, unless it was asked to."""
        self._uvicorn.run(sockets=[listener])

    def stop(self) -> None:
        """From any thread."""
        self._uvicorn.should_exit = True

    def _app(self) -> FastAPI:
        closed = APIRouter(dependencies=[Depends(self._check_token)])
        closed.add_api_route("/v1/score", self._score, methods=["POST"], response_model=None)
        closed.add_api_route("/v1/selftest", self._selftest, methods=["POST"], response_model=None)
        closed.add_api_route("/v1/residency", self._residency, methods=["GET"], response_model=None)
        closed.add_api_route("/v1/residency", self._move, methods=["POST"], response_model=None)
        closed.add_api_route("/v1/scorers", self._scorers, methods=["GET"], response_model=None)
        closed.add_api_route("/metrics", self._metrics, methods=["GET"], response_model=None)
        app = FastAPI(title="UniRL rewards", lifespan=self._lifespan, openapi_url=None)
        app.include_router(closed)
        app.add_api_route("/readyz", self._ready, methods=["GET"], response_model=None)
        app.add_api_route("/healthz", _alive, methods=["GET"], response_model=None)
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncGenerator[None]:
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            loading.cancel()
            await self._fleet.close()

    async def _load(self) -> None:
        """A scorer that fails ends the server."""
        self.failure = await self._fleet.load()
        if self.failure is not None:
            self.stop()

    async def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), self._token):
            raise HTTPException(401, "the token is missing or another one", {"WWW-Authenticate": "Bearer"})

    async def _score(self, request: Request) -> Response:
        start = time.monotonic()
        content_type = request.headers.get("content-type", protocol.MEDIA_TYPE).partition(";")[0].strip().lower()
        if content_type not in protocol.FORMS:
            return _refused(415, f"the Content-Type is one of {sorted(protocol.FORMS)}, got {content_type!r}")
        form = protocol.FORMS[content_type]
        try:
            with self._fleet.arrival():
                names, samples = await self._asked(request, form)
            content = await self._once(request, names, samples, form, start)
        except (Malformed, TooLarge, _UnknownScorer, _OtherRequest) as error:
            return _refused(_STATUS[type(error)], str(error))
        except (QueueFull, NotReady, Stuck, Overdue) as error:
            return _refused(_STATUS[type(error)], str(error), _AGAIN)
        except TimeoutError:
            return _refused(408, f"the body did not arrive within {_BODY_SECONDS} s")
        except Closed:
            return _refused(503, "the server stops", _AGAIN)
        return Response(content, media_type=content_type)

    async def _asked(self, request: Request, form: protocol.Form) -> tuple[list[str], dict[str, ScorerInput]]:
        body, most = await self._body(request), self.config.max_body_mb * 2**20

        def parsed() -> tuple[list[str], dict[str, ScorerInput]]:
            return protocol.parsed_request(body, most_items=self.config.max_items, most_bytes=most, form=form)

        # Base64 and files take time, in which others are served; raw bytes take less than another thread.
        names, samples = await asyncio.to_thread(parsed) if form == "json" else parsed()
        unknown = sorted(set(names) - set(self.config.scorers))
        if unknown:
            raise _UnknownScorer(f"no scorer {unknown}; served are {sorted(self.config.scorers)}")
        return names, samples

    async def _body(self, request: Request) -> bytes:
        most = self.config.max_body_mb * 2**20
        parts, size = list[bytes](), 0
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise TooLarge(f"a body of more than max_body_mb={self.config.max_body_mb}")
                parts.append(part)
        return b"".join(parts)

    async def _once(
        self, request: Request, names: list[str], samples: dict[str, ScorerInput], form: protocol.Form, start: float
    ) -> bytes:
        """The reply; that of an earlier request of the same idempotency key, also where it is still in work."""
        if protocol.KEY_HEADER not in request.headers:
            return await self._reply(names, samples, form, start)
        key = request.headers[protocol.KEY_HEADER]
        what = (form, tuple(names), tuple((identity, sample.id) for identity, sample in samples.items()))
        if key in self._replies:
            earlier, task = self._replies[key]
            if earlier != what:
                raise _OtherRequest(f"idempotency key {key!r} was that of another request")
            self._figures.repeated.inc()
        else:
            task = asyncio.create_task(self._reply(names, samples, form, start))
            self._replies[key] = (what, task)
            task.add_done_callback(lambda done: self._forget(key, done))
        # A client that goes away does not take the work of its next try with it.
        return await asyncio.shield(task)

    def _forget(self, key: str, done: asyncio.Task[bytes]) -> None:
        """A failure is no reply to keep, and of replies the newest are kept."""
        if done.cancelled() or done.exception() is not None:
            self._replies.pop(key, None)
        while len(self._replies) > self.config.max_replies:
            oldest = next((key for key, (_, task) in self._replies.items() if task.done()), None)
            if oldest is None:
                return
            del self._replies[oldest]

    async def _reply(
        self, names: list[str], samples: dict[str, ScorerInput], form: protocol.Form, start: float
    ) -> bytes:
        columns = await self._fleet.outcomes(names, list(samples.values()))
        rows = zip(*columns, strict=True)
        results = {identity: dict(zip(names, row, strict=True)) for identity, row in zip(samples, rows, strict=True)}
        versions = {name: self._fleet.versions[name] for name in names}
        return protocol.reply(versions, results, samples, seconds=time.monotonic() - start, form=form)

    async def _selftest(self) -> Response:
        try:
            complaints = await self._fleet.complaints()
        except (NotReady, Stuck, Overdue) as error:
            return _refused(_STATUS[type(error)], str(error), _AGAIN)
        passed = not any(complaints.values())
        return JSONResponse({"passed": passed, "complaints": complaints}, status_code=200 if passed else 500)

    async def _residency(self) -> Response:
        return JSONResponse({"state": self._fleet.state})

    async def _move(self, request: Request) -> Response:
        try:
            to = _residency(await self._body(request))
            await self._fleet.move(to)
        except (Malformed, TooLarge) as error:
            return _refused(_STATUS[type(error)], str(error))
        except (NotReady, Overdue) as error:
            return _refused(_STATUS[type(error)], str(error), _AGAIN)
        except Closed:
            return _refused(503, "the server stops", _AGAIN)
        except Exception as error:  # noqa: BLE001 - scorers are anybody's code; told to who asked
            _log.exception("residency")
            return _refused(500, f"{type(error).__name__}: {error}")
        return JSONResponse({"state": self._fleet.state})

    async def _scorers(self) -> Response:
        scorers = {
            name: described(self.config.scorers[name].scorer) | {"version": version}
            for name, version in self._fleet.versions.items()
        }
        return JSONResponse({"protocol": protocol.PROTOCOL, "ready": not self._fleet.obstacle(), "scorers": scorers})

    async def _ready(self) -> Response:
        obstacle = self._fleet.obstacle()
        if obstacle:
            return JSONResponse({"ready": False, "why": obstacle}, status_code=503)
        return JSONResponse({"ready": True})

    async def _metrics(self) -> Response:
        self._figures.waiting.set(self._fleet.waiting)
        content = prometheus_client.generate_latest(self._figures.registry)
        return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _UnknownScorer(Exception):
    pass


class _OtherRequest(Exception):
    pass


_STATUS = {
    Malformed: 400,
    _UnknownScorer: 404,
    TooLarge: 413,
    _OtherRequest: 422,
    QueueFull: 429,
    NotReady: 503,
    Stuck: 503,
    Overdue: 504,
}


class _Figures:
    """What /metrics shows, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.samples = prometheus_client.Counter(
            "unirl_reward_samples", "samples scored", ["scorer", "outcome"], registry=self.registry
        )
        self.sizes = prometheus_client.Histogram(
            "unirl_reward_batch_size", "samples in a batch", ["scorer"], buckets=_BATCH_SIZES, registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "unirl_reward_batch_seconds", "time of a batch", ["scorer"], registry=self.registry
        )
        self.waiting = prometheus_client.Gauge("unirl_reward_waiting", "samples waiting", registry=self.registry)
        self.repeated = prometheus_client.Counter(
            "unirl_reward_repeated", "requests answered by an earlier reply", registry=self.registry
        )

    def count(self, batch: Batch) -> None:
        failed = sum(1 for outcome in batch.outcomes if outcome.cause)
        self.samples.labels(batch.scorer, "error").inc(failed)
        self.samples.labels(batch.scorer, "score").inc(len(batch.outcomes) - failed)
        self.sizes.labels(batch.scorer).observe(len(batch.outcomes))
        self.seconds.labels(batch.scorer).observe(batch.seconds)


def _residency(body: bytes) -> Residency:
    """The state that is asked for."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no json: {error}") from None
    for state in get_args(Residency):
        if asked == {"state": state}:
            return state
    raise Malformed(f'the body is {{"state": "resident"}} or {{"state": "offloaded"}}, got {asked!r:.100}')


async def _alive() -> Response:
    return JSONResponse({"alive": True})


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=headers)
