"""The end points of a reward server.

    POST /v1/score     protocol.py
    GET  /v1/scorers   what is served, with versions
    POST /v1/selftest  the examples once more
    GET  /healthz      the process is alive         GET /readyz   every scorer is loaded and has passed its examples
    GET  /metrics      Prometheus

400: malformed. 401: the token. 404: no such scorer. 408: too slow. 413: too large. 422: the key of another request.
429 and 503, with Retry-After: full; loading or stopping. A sample that fails is an error in a reply of status 200.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hmac
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any

import prometheus_client
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from unirl.config.environment import secret
from unirl.config.load import dump
from unirl.reward.http import protocol, selftest
from unirl.reward.http.batching import Batch, Closed, Lane, QueueFull
from unirl.reward.http.config import ServeConfig, ServedScorer
from unirl.reward.http.other_python import OtherPython
from unirl.reward.model_scorer import ModelScorer
from unirl.reward.outcome import Outcome
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.time_limit import TimeLimited
from unirl.reward.version import by_settings, version_of

_log = logging.getLogger(__name__)
_END_SECONDS = 5  # for what is in work when the server stops
_BODY_SECONDS = 120  # for a request to arrive
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def listening_socket(config: ServeConfig) -> socket.socket:
    """OSError where the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family)


class RewardServer:
    """Serves `config` on a listening socket, until `stop` or a signal."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.failure: str | None = None
        self._figures = _Figures()
        self._lanes: dict[str, Lane] = {}
        self._versions: dict[str, str] = {}
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
            for lane in {id(lane): lane for lane in self._lanes.values()}.values():
                await asyncio.to_thread(lane.close, _END_SECONDS)

    async def _load(self) -> None:
        """Lanes, models and examples; a scorer that fails ends the server."""
        scorers = self.config.scorers
        shared = {name: served.scorer for name, served in scorers.items() if not served.apart}
        if shared:
            lane = self._lane(dict(shared))
            self._lanes.update(dict.fromkeys(shared, lane))
        for name, served in scorers.items():
            if served.apart:
                self._lanes[name] = self._lane({name: _apart(name, served)})
        for name in scorers:
            try:
                version = await self._version(name)
                wrong = await self._complaint(name)
            except Exception as error:  # noqa: BLE001 - scorers are anybody's code; told to who started the server
                _log.exception("scorer %s", name)
                version, wrong = "", f"{type(error).__name__}: {error}"
            if wrong is not None:
                self.failure = f"scorer {name} is not fit to be served: {wrong}"
                self.stop()
                return
            self._versions[name] = version

    async def _version(self, name: str) -> str:
        """Found on the thread that will run the scorer; what has a time limit is loaded by its own processes only."""
        lane, served = self._lanes[name], self.config.scorers[name]
        if isinstance(runner := lane.scorers[name], OtherPython):
            return await asyncio.wrap_future(lane.call(lambda: runner.version))
        if isinstance(runner, TimeLimited):
            return by_settings(served.scorer)
        return await asyncio.wrap_future(lane.call(lambda: version_of(served.scorer)))

    def _lane(self, scorers: dict[str, Scorer | TimeLimited]) -> Lane:
        return Lane(
            scorers,
            max_batch=self.config.max_batch,
            max_wait=self.config.max_wait_ms / 1000,
            max_queue=self.config.max_queue,
            done=self._figures.count,
        )

    async def _complaint(self, name: str) -> str | None:
        """Of the examples of a scorer: all of them twice, then each alone."""
        examples = self.config.scorers[name].examples
        if not examples:
            return None
        samples = selftest.inputs(examples)
        runs = [await self._outcomes(name, samples) for _ in range(2)]
        alone = [(await self._outcomes(name, [sample]))[0] for sample in samples]
        return selftest.complaint(examples, runs, alone)

    async def _outcomes(self, name: str, samples: list[ScorerInput]) -> list[Outcome]:
        return await asyncio.wrap_future(self._lanes[name].submit(name, samples))

    async def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), self._token):
            raise HTTPException(401, "the token is missing or another one", {"WWW-Authenticate": "Bearer"})

    async def _score(self, request: Request) -> Response:
        try:
            body = await self._body(request)
            names, samples = protocol.parsed_request(body, self.config.max_items)
            unknown = sorted(set(names) - set(self.config.scorers))
            if unknown:
                return _refused(404, f"no scorer {unknown}; served are {sorted(self.config.scorers)}")
            if not self._is_ready():
                return _refused(503, "the scorers are loading", {"Retry-After": "1"})
            content = await self._once(request, names, samples)
        except _TooLarge as error:
            return _refused(413, str(error))
        except protocol.Malformed as error:
            return _refused(400, str(error))
        except _OtherRequest as error:
            return _refused(422, str(error))
        except QueueFull as error:
            return _refused(429, str(error), {"Retry-After": "1"})
        except TimeoutError:
            return _refused(408, f"the body did not arrive within {_BODY_SECONDS} s")
        except Closed:
            return _refused(503, "the server stops", {"Retry-After": "1"})
        return Response(content, media_type=protocol.MEDIA_TYPE)

    async def _body(self, request: Request) -> bytes:
        most = self.config.max_body_mb * 2**20
        parts, size = list[bytes](), 0
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _TooLarge(f"a body of more than max_body_mb={self.config.max_body_mb}")
                parts.append(part)
        return b"".join(parts)

    async def _once(self, request: Request, names: list[str], samples: dict[str, ScorerInput]) -> bytes:
        """The reply; that of an earlier request of the same idempotency key, also where it is still in work."""
        if protocol.KEY_HEADER not in request.headers:
            return await self._reply(names, samples)
        key = request.headers[protocol.KEY_HEADER]
        what = (tuple(names), tuple((identity, sample.id) for identity, sample in samples.items()))
        if key in self._replies:
            earlier, task = self._replies[key]
            if earlier != what:
                raise _OtherRequest(f"idempotency key {key!r} was that of another request")
            self._figures.repeated.inc()
        else:
            task = asyncio.create_task(self._reply(names, samples))
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

    async def _reply(self, names: list[str], samples: dict[str, ScorerInput]) -> bytes:
        columns = await asyncio.gather(*(self._outcomes(name, list(samples.values())) for name in names))
        rows = zip(*columns, strict=True)
        results = {identity: dict(zip(names, row, strict=True)) for identity, row in zip(samples, rows, strict=True)}
        return protocol.reply({name: self._versions[name] for name in names}, results, samples)

    async def _selftest(self) -> Response:
        if not self._is_ready():
            return _refused(503, "the scorers are loading", {"Retry-After": "1"})
        complaints = {name: await self._complaint(name) for name in self.config.scorers}
        passed = not any(complaints.values())
        return JSONResponse({"passed": passed, "complaints": complaints}, status_code=200 if passed else 500)

    async def _scorers(self) -> Response:
        scorers = {
            name: _described(self.config.scorers[name].scorer) | {"version": version}
            for name, version in self._versions.items()
        }
        return JSONResponse({"protocol": protocol.PROTOCOL, "ready": self._is_ready(), "scorers": scorers})

    async def _ready(self) -> Response:
        return JSONResponse({"ready": self._is_ready()}, status_code=200 if self._is_ready() else 503)

    async def _metrics(self) -> Response:
        self._figures.waiting.set(sum({id(lane): lane.waiting for lane in self._lanes.values()}.values()))
        content = prometheus_client.generate_latest(self._figures.registry)
        return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def _is_ready(self) -> bool:
        return len(self._versions) == len(self.config.scorers)


class _TooLarge(Exception):
    pass


class _OtherRequest(Exception):
    pass


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


def _apart(name: str, served: ServedScorer) -> TimeLimited | OtherPython:
    """What runs a scorer that has processes of its own."""
    if served.python is not None:
        section = dump(served) | {"python": None, "examples": []}
        return OtherPython(name, served.python, section)
    assert served.limit is not None
    return TimeLimited(name, served.scorer, served.limit, served.processes)


def _described(scorer: Scorer) -> dict[str, Any]:
    return dataclasses.asdict(scorer.card) if isinstance(scorer, ModelScorer) else {}


async def _alive() -> Response:
    return JSONResponse({"alive": True})


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=headers)
