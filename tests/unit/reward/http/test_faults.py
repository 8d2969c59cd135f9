"""Servers that fail, lie, are slow or gone: bounded tries, then the samples are invalid (FIELD_FAULTS 93, 95, 96)."""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.samples import Rule, accepted, answered, cause, entry, generated, service, wrote
from tests.unit.reward.scorers.judge_server import Reply, Server, serving
from unirl.reward.http import protocol
from unirl.reward.http.client import Server as ServerSettings
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.remote import RemoteScorer

LISTING = json.dumps({"protocol": 1, "ready": True, "scorers": {"level": {"version": "1"}}}).encode()


def said(results: Any) -> bytes:
    return protocol.packed({"protocol": 1, "versions": {"level": "1"}, "results": results})


def scored(scores: dict[str, float]) -> bytes:
    return said({identity: {"level": {"score": score}} for identity, score in scores.items()})


@contextlib.contextmanager
def scripted(script: Callable[[int], Reply]) -> Iterator[Server]:
    """A server that answers the same request by a script of how often it has come before."""
    with serving(
        lambda _, before: script(before),
        parsed=msgpack.unpackb,
        message_of=lambda body: "".join(item["id"] for item in body["items"]),
        page=LISTING,
    ) as server:
        yield Server(server.url.removesuffix("/v1"), server.requests, server.headers)


def two() -> list[ScorerInput]:
    return [wrote("a"), wrote("b")]


GOOD = scored({"0": 0.0, "1": 2.5})
TWICE = GOOD.replace(b"\xa11", b"\xa10")  # the text "1" as "0": two results have one id


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=500, body=b"out of memory"),
        Reply(status=503, headers=(("Retry-After", "0"),), body=b"loading"),
        Reply(status=429, body=b"full"),
        Reply(reset=True),
        Reply(body=GOOD[:-3]),
        Reply(body=GOOD, headers=(("Connection", "close"),), length=len(GOOD) + 1),
        Reply(body=b"<html>"),
        Reply(body=b""),
        Reply(body=scored({"0": 1.0, "1": math.nan})),
        Reply(body=scored({"0": 1.0})),
        Reply(body=scored({"0": 1.0, "1": 1.0, "2": 1.0})),
        Reply(body=said({"0": {"other": {"score": 1.0}}, "1": {"level": {"score": 1.0}}})),
        Reply(body=said({"0": {"level": {"score": "1"}}, "1": {"level": {"score": 1.0}}})),
        Reply(body=said([1.0, 2.0])),
        Reply(body=TWICE),
        Reply(body=msgpack.packb({"protocol": 2, "results": {}})),
    ],
    ids=[
        "500", "503", "429", "reset", "truncated msgpack", "truncated body", "html", "nothing", "NaN", "too few",
        "too many", "another scorer", "text for a number", "a list", "duplicate ids", "another protocol",
    ],
)  # fmt: skip
def test_a_fault_twice_then_a_reply_costs_no_sample_and_always_costs_both(bad):
    with scripted(lambda before: bad if before < 2 else Reply(body=GOOD)) as server:
        assert remote(server.url).score(two()) == [0.0, 2.5]
        assert len(server.requests) == 3
        assert len({headers["Idempotency-Key"] for headers in server.headers}) == 1
    with scripted(lambda _: bad) as server:
        scores = remote(server.url, tries=3).score(two())
        assert len(server.requests) == 3 + bad.reset  # a kept connection that breaks is none of the tries
    assert all(math.isnan(score) for score in scores)
    assert all(cause(score).startswith(f"{server.url}: ") for score in scores)
    assert all(cause(score).endswith("(try 3 of 3)") for score in scores)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not_tried_again(status):
    with scripted(lambda _: Reply(status=status, body=b"no")) as server:
        (score, _) = remote(server.url).score(two())
        assert len(server.requests) == 1
    assert cause(score) == f"{server.url}: status {status}: 'no' (try 1 of 8)"


def test_a_reply_in_another_order_gives_each_sample_its_own_score():
    with scripted(lambda _: Reply(body=scored({"1": 1.0, "0": 5.0}))) as server:
        assert remote(server.url).score(two()) == [5.0, 1.0]


def test_a_slow_reply_is_given_up_and_asked_for_again():
    with scripted(lambda before: Reply(body=GOOD, delay=30.0 if before == 0 else 0.0)) as server:
        start = time.monotonic()
        assert remote(server.url, seconds_per_try=1.0).score(two()) == [0.0, 2.5]
        assert time.monotonic() - start < 10


def test_all_chunks_together_end_with_the_time_for_the_call():
    with scripted(lambda _: Reply(delay=30.0)) as server:
        start = time.monotonic()
        scores = remote(server.url, chunk=1, concurrency=1, seconds_in_all=0.5).score([wrote("a")] * 5)
        assert time.monotonic() - start < 10
    assert all(math.isnan(score) for score in scores)


def test_a_server_that_comes_back_with_another_version_gives_no_scores():
    other = msgpack.packb({"protocol": 1, "versions": {"level": "2"}, "results": {}})
    with scripted(lambda before: Reply(body=other)) as server:
        (score, _) = remote(server.url).score(two())
        assert len(server.requests) == 1
    assert cause(score) == f"{server.url}: scorer 'level' is now version '2', and was '1' (try 1 of 8)"


def test_failures_above_max_invalid_stop_the_run_naming_scorer_server_and_cause():
    with scripted(lambda _: Reply(status=400, body=b"no field")) as server:
        rewards = service(clip=remote(server.url))
        with pytest.raises(RuntimeError, match=rf"clip on 2. First cause: .*{server.url}: status 400: 'no field'"):
            accepted(rewards, answered(["a", "b"]))


def test_rows_without_a_score_are_invalid_and_have_no_advantage_and_a_score_of_0_is_one():
    results: dict[str, Any] = {str(row): {"level": {"score": float(row)}} for row in range(8)}
    results["2"] = {"level": {"error": "no level"}}
    with scripted(lambda _: Reply(body=said(results))) as server:
        sample = generated(["a fox", "a dog"], branch=4)
        scores = service(max_invalid=0.2, level=remote(server.url)).score(sample)
    part = sample.frontier.with_rewards(scores).compute_advantages(scale="none")
    assert part.valid.tolist() == [True, True, False, True, True, True, True, True]
    assert scores.total.nan_to_num(-1).tolist() == [0, 1, -1, 3, 4, 5, 6, 7]
    assert part.advantages is not None
    expected = [0 - 4 / 3, 1 - 4 / 3, 0, 3 - 4 / 3, -1.5, -0.5, 0.5, 1.5]
    assert part.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores.causes[2].endswith("no level")


def test_replies_in_the_order_of_their_end_give_each_sample_its_own_score():
    ended, chance = list[int](), random.Random(0)

    def late(sample: ScorerInput) -> float:
        time.sleep(chance.uniform(0, 0.1))
        ended.append(int(sample.picture[0, 0, 0]))
        return ended[-1] / 7

    samples = [entry(np.full((2, 2, 3), level, np.uint8)) for level in range(12)]
    with live({"level": Rule(late)}) as one, live({"level": Rule(late)}) as other:
        both = RemoteScorer(ServerSettings((one, other), chunk=1, concurrency=12, pause=0.01), "level")
        assert both.score(samples) == [level / 7 for level in range(12)]
    assert ended != sorted(ended) == list(range(12))


def test_nobody_listening_is_invalid_and_names_the_server():
    with scripted(lambda _: Reply(body=GOOD)) as server:
        scorer = remote(server.url, tries=2)
        scorer.connect()
        scorer.close()  # the threads of this server go on serving connections that they have
    assert cause(scorer.score(two())[0]).startswith(f"{server.url}: ConnectError: ")


def item(**changes: Any) -> dict[str, Any]:
    medium = {"kind": "image", "encoding": "raw", "dtype": "uint8", "shape": [1, 1, 3], "data": b"abc"}
    whole = {
        "id": "0",
        "sample": "r0.p0/0",
        "prompt": "",
        "metadata": {},
        "media": [medium | changes.pop("medium", {})],
    }
    return whole | changes


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"\x80\x04pickle", 400, "no msgpack"),
        (b"", 400, "no msgpack"),
        (msgpack.packb([1]), 400, "no mapping with a protocol"),
        (msgpack.packb({"protocol": 7}), 400, "protocol 7; this side speaks 1"),
        ({"scorers": []}, 400, "scorers must be different names"),
        ({"scorers": ["clip"]}, 404, "no scorer ['clip']; served are ['level']"),
        ({"items": []}, 400, "items must be 1 to 4, got 0"),
        ({"items": [item(id=str(n)) for n in range(5)]}, 400, "items must be 1 to 4, got 5"),
        ({"items": [item(), item()]}, 400, "items[1]: id '0' is there twice"),
        ({"items": [item(prompt=3)]}, 400, "items[0].prompt must be str, got int"),
        ({"items": [item(extra=3)]}, 400, "items[0]: unknown ['extra']"),
        ({"items": [item(medium={"shape": [2, 1, 3]})]}, 400, "3 bytes do not fill [2, 1, 3] uint8"),
        ({"items": [item(medium={"shape": [-1, 1, 3]})]}, 400, "image is uint8 of 3 dimensions"),
        ({"items": [item(medium={"shape": [3, 1, 1]})]}, 400, "image has 3 channels last"),
        ({"items": [item(medium={"dtype": "object"})]}, 400, "image is uint8 of 3 dimensions"),
        ({"items": [item(medium={"encoding": "gif"})]}, 400, "got 'gif' 'image'"),
        ({"items": [item(medium={"encoding": "jpeg"})]}, 400, "unknown ['dtype', 'shape']; jpeg has"),
        ({"items": [item(medium={"rate": math.nan})]}, 400, "rate must be positive"),
        (b"x" * (1 << 20) + b"x", 413, "max_body_mb=1"),
    ],
)  # fmt: skip
def test_a_server_refuses_what_is_malformed_and_says_where(body, status, words):
    if isinstance(body, dict):
        body = msgpack.packb({"protocol": 1, "scorers": ["level"], "items": [item()], **body})
    with live({"level": Level()}, max_items=4, max_body_mb=1) as url:
        response = httpx.post(f"{url}/v1/score", content=body)
        assert remote(url, chunk=4).score([entry(np.zeros((1, 1, 3), np.uint8))]) == [0.0]
    assert response.status_code == status
    assert words in response.json()["error"]


def test_a_body_far_over_the_limit_is_refused_for_the_client_too():
    big = [entry(np.zeros((2000, 2000, 3), np.uint8))]
    with live({"level": Level()}, max_body_mb=1) as url:
        (score,) = remote(url).score(big)
    assert "status 413" in cause(score)


def test_a_wrong_token_is_refused_and_never_shown(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret-1")
    monkeypatch.setenv("OTHER_TOKEN", "secret-2")
    with live({"level": Level()}, token_variable="REWARD_TOKEN") as url:
        assert httpx.post(f"{url}/v1/score").status_code == 401
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert remote(url, token_variable="REWARD_TOKEN").score([entry(np.zeros((1, 1, 3), np.uint8))]) == [0.0]
        with pytest.raises(ValueError, match="status 401") as refusal:
            service(r=remote(url, token_variable="OTHER_TOKEN"))
    assert "secret" not in str(refusal.value)


def test_a_full_queue_sends_clients_away_until_there_is_room():
    level = Level(seconds=0.05)
    samples = [entry(np.full((2, 2, 3), number, np.uint8)) for number in range(12)]
    with live({"level": level}, max_batch=1, max_queue=2, max_items=2) as url:
        scores = remote(url, chunk=2, concurrency=4, tries=40, seconds_in_all=60.0).score(samples)
        text = httpx.get(f"{url}/metrics").text
    assert scores == [number / 7 for number in range(12)]
    assert 'unirl_reward_samples_total{outcome="score",scorer="level"} 12.0' in text


def test_a_client_that_goes_away_does_not_stop_the_server():
    with live({"level": Level()}) as url:
        host, port = url.removeprefix("http://").split(":")
        for sent in (b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc", b"\x00\xff\r\n\r\n"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
        assert remote(url).score([entry(np.zeros((1, 1, 3), np.uint8))]) == [0.0]
