"""Connections to a reward server are kept between calls, and what becomes of them costs no sample its score."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgpack
import pytest

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.samples import cause, wrote
from unirl.reward.http import protocol
from unirl.reward.scorers.remote import RemoteScorer

LISTING = json.dumps({"protocol": 1, "ready": True, "scorers": {"level": {"version": "1"}}}).encode()


@contextlib.contextmanager
def counting(requests: int) -> Iterator[tuple[str, list[int]]]:
    """The URL of a server that answers `requests` requests of a connection and closes it at the next, and how many of
    each connection it has had."""
    had: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            self.number = len(had)
            had.append(0)
            super().setup()

        def answer(self, content: bytes) -> None:
            had[self.number] += 1
            if had[self.number] > requests:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer(LISTING)

        def do_POST(self) -> None:
            asked = msgpack.unpackb(self.rfile.read(int(self.headers["Content-Length"])))
            results = {item["id"]: {"level": {"score": 2.0}} for item in asked["items"]}
            self.answer(protocol.packed({"protocol": 1, "versions": {"level": "1"}, "results": results}))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", had
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def closed(scorer: RemoteScorer) -> Iterator[RemoteScorer]:
    try:
        yield scorer
    finally:
        scorer.close()


def test_calls_in_a_row_share_a_connection() -> None:
    with counting(100) as (url, had), closed(remote(url)) as scorer:
        assert [scorer.score([wrote("a")]) for _ in range(5)] == [[2.0]] * 5
        assert had == [6]  # the list of scorers, and five of scores


def test_a_kept_connection_that_the_server_closes_is_no_failed_try() -> None:
    with counting(2) as (url, had), closed(remote(url, tries=1)) as scorer:
        assert [scorer.score([wrote("a")]) for _ in range(4)] == [[2.0]] * 4
        assert had == [3, 3, 1]


def test_a_new_connection_that_the_server_closes_is_one() -> None:
    with counting(0) as (url, had), closed(remote(url, tries=1)) as scorer:
        with pytest.raises(ValueError, match="RemoteProtocolError: Server disconnected without sending a response"):
            scorer.connect()
        assert had == [1] * 3  # as many tries as a run has to start


def test_it_survives_a_restart_of_the_server() -> None:
    with live({"level": Level()}) as url, closed(remote(url, scorer="level", tries=1)) as scorer:
        port = int(url.rpartition(":")[2])
        first = scorer.score([wrote("a")])
    assert "no picture" in cause(first[0])
    with live({"level": Level()}, port=port) as url, closed(remote(url)) as other, closed(scorer):
        other.connect()  # the scorers have loaded: until then the answer is 503, which is a failed try
        assert "no picture" in cause(scorer.score([wrote("a")])[0])


def test_threads_share_the_connections_and_a_copy_has_its_own() -> None:
    with counting(100) as (url, had), closed(remote(url)) as scorer:
        scorer.connect()
        with ThreadPoolExecutor(4) as threads:
            scores = list(threads.map(lambda _: scorer.score([wrote("a")])[0], range(40)))
        assert scores == [2.0] * 40
        assert len(had) <= 4
        before = len(had)
        with closed(pickle.loads(pickle.dumps(scorer))) as copy:
            assert copy == scorer
            assert copy.score([wrote("a")]) == [2.0]
        assert len(had) == before + 1


def test_a_closed_scorer_connects_anew() -> None:
    with counting(100) as (url, had), closed(remote(url)) as scorer:
        for _ in range(2):
            assert scorer.score([wrote("a")]) == [2.0]
            scorer.close()
        assert had == [2, 1]


def _score(scorer: RemoteScorer, answers: multiprocessing.SimpleQueue[list[float]]) -> None:
    answers.put(scorer.score([wrote("a")]))


def test_a_forked_process_connects_anew() -> None:
    context = multiprocessing.get_context("fork")
    with counting(100) as (url, had), closed(remote(url)) as scorer:
        scorer.connect()
        answers = context.SimpleQueue()
        process = context.Process(target=_score, args=(scorer, answers))
        process.start()
        process.join(20)
        assert process.exitcode == 0
        assert answers.get() == [2.0]
        assert had == [1, 1]
