"""A batch that does not end: nobody waits for ever, the cause is named, and what comes later is told at once."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.http.test_serve import complaint
from tests.unit.reward.samples import Rule, entry, generated, service
from unirl.reward.http import protocol
from unirl.reward.http.batching import Lane, Overdue, Stuck
from unirl.reward.http.config import Example, ServedScorer
from unirl.reward.scorer import Scorer, ScorerInput, Unscored


@dataclasses.dataclass(frozen=True)
class Spins(Scorer):
    """The level of the first pixel; 202 spins until `stop` is set."""

    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    calls: list[int] = dataclasses.field(default_factory=list)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        levels = [int(sample.picture[0, 0, 0]) for sample in samples]
        self.calls.extend(levels)
        while 202 in levels and not self.stop.is_set():
            pass
        return [float(level) for level in levels]


def picture(level: int) -> ScorerInput:
    return entry(np.full((2, 2, 3), level, np.uint8))


def body(scorer: str, level: int) -> bytes:
    return b"".join(protocol.request(scorer, [protocol.item(0, picture(level))]))


LATE = "scorer spins is at a batch for longer than batch_seconds=2"


def test_a_spinning_scorer_gives_504_then_503_until_it_ends_and_scores_again():
    spins = Spins()
    with live({"spins": spins, "level": Level()}, batch_seconds=2) as url, ThreadPoolExecutor(2) as pool:
        post = f"{url}/v1/score"
        first = pool.submit(httpx.post, post, content=body("spins", 202), timeout=30)
        while not spins.calls:
            time.sleep(0.01)
        behind = pool.submit(httpx.post, post, content=body("level", 9), timeout=30)
        for waited in (first.result(), behind.result()):
            assert (waited.status_code, waited.json()) == (504, {"error": LATE})
        later = httpx.post(post, content=body("level", 9))
        assert (later.status_code, later.json(), later.headers["Retry-After"]) == (503, {"error": LATE}, "1")
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "why": LATE})
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.post(f"{url}/v1/residency", json={"state": "offloaded"}).json() == {"error": LATE}
        spins.stop.set()
        assert remote(url, tries=20).score([picture(7)]) == [1.0]
        assert httpx.get(f"{url}/readyz").status_code == 200
    assert spins.calls == [202]


def test_its_samples_are_invalid_after_the_tries_of_the_client():
    spins = Spins()
    with live({"spins": spins}, batch_seconds=1, max_batch=1) as url:
        scores = remote(url, "spins", tries=3, chunk=1, concurrency=1).score([picture(7), picture(202), picture(8)])
        spins.stop.set()
    assert scores[0] == 7.0
    for score in scores[1:]:
        assert isinstance(score, Unscored)
        assert score.cause.startswith(f"{url}: status 503: ")
        assert "is at a batch for longer than batch_seconds=1" in score.cause
        assert score.cause.endswith("(try 3 of 3)")
    assert spins.calls == [7, 202]


def test_what_nobody_waits_for_is_not_scored():
    spins = Spins()
    with live({"spins": spins}, batch_seconds=2, max_batch=1) as url, ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(httpx.post, f"{url}/v1/score", content=body("spins", 202), timeout=30)]
        while not spins.calls:
            time.sleep(0.01)
        posts += [pool.submit(httpx.post, f"{url}/v1/score", content=body("spins", level)) for level in (1, 2)]
        assert [post.result().status_code for post in posts] == [504] * 3
        spins.stop.set()
        assert remote(url, "spins", tries=20).score([picture(3)]) == [3.0]
        assert "unirl_reward_waiting 0.0" in httpx.get(f"{url}/metrics").text.splitlines()
    assert spins.calls == [202, 3]


def test_a_step_goes_on_without_the_sample_that_a_time_limit_stops():
    sample = generated([f"prompt {row}" for row in (0, 1)], branch=102)  # rows are levels: one of them is 202
    served = {"spins": ServedScorer(Level(), time_limit=1.0, processes=2)}
    with live(served, batch_seconds=0.1) as url:  # its processes have a bound of their own
        over = remote(url, "spins", seconds_per_try=60.0, seconds_in_all=60.0)
        scores = service(max_invalid=0.1, spins=over).score(sample)
    part = sample.frontier.with_rewards(scores).compute_advantages()
    invalid = [row for row, ok in enumerate(part.valid.tolist()) if not ok]
    assert invalid == [200, 201, 202]
    assert "not scored within the time limit of 1 s" in scores.causes[202]
    assert part.advantages is not None
    assert part.advantages[invalid].tolist() == [0.0] * 3
    assert part.advantages[:102].double().mean().item() == pytest.approx(0, abs=1e-6)
    assert scores.total[7].item() == 1.0


def test_an_example_that_spins_ends_the_start():
    stop = threading.Event()
    scorer = Rule(lambda _: float(stop.wait(60)))
    threading.Timer(2, stop.set).start()
    assert complaint(Example("a"), scorer=scorer, batch_seconds=0.2) == (
        "scorer s is not fit to be served: Overdue: scorer s is at a batch for longer than batch_seconds=0.2"
    )


def test_a_model_that_takes_too_long_to_load_ends_the_start():
    stop = threading.Event()

    class Slow(Level):
        def prepare(self) -> None:
            stop.wait(60)

    threading.Timer(2, stop.set).start()
    assert complaint(scorer=Slow(), load_seconds=0.2) == (
        "scorer s is not fit to be served: it is not loaded after load_seconds=0.2"
    )


# --- batches ---


def lane(scorer: Scorer, coming: list[bool], batch_seconds: float = 60.0) -> Lane:
    return Lane(
        {"s": scorer}, max_batch=8, max_wait=3600.0, max_queue=64, batch_seconds=batch_seconds,
        coming=lambda: coming[0], done=lambda _: None,
    )  # fmt: skip


def test_a_sample_waits_for_company_only_while_a_request_is_on_its_way():
    level, coming = Level(), [False]
    one = lane(level, coming)
    assert [outcome.value for outcome in one.submit("s", [picture(7)]).future.result(30)] == [1.0]
    coming[0] = True
    first = one.submit("s", [picture(14)])
    coming[0] = False
    second = one.submit("s", [picture(21)])
    assert [ticket.future.result(30)[0].value for ticket in (first, second)] == [2.0, 3.0]
    one.close(10)
    assert level.calls == [1, 2]


def test_what_comes_while_a_batch_is_scored_is_the_next_batch():
    spins = Spins()
    one = lane(spins, [False])
    first = one.submit("s", [picture(202)])
    while not spins.calls:
        time.sleep(0.01)
    rest = [one.submit("s", [picture(level)]) for level in range(5)]
    spins.stop.set()
    assert [ticket.future.result(30)[0].value for ticket in (first, *rest)] == [202.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    one.close(10)
    assert spins.calls == [202, 0, 1, 2, 3, 4]


def test_a_lane_that_is_stuck_takes_nothing():
    spins = Spins()
    one = lane(spins, [False], batch_seconds=0.05)
    with pytest.raises(Overdue, match=r"batch_seconds=0\.05"):
        asyncio.run(one.outcomes("s", [picture(202)]))
    with pytest.raises(Stuck, match=r"batch_seconds=0\.05"):
        one.submit("s", [picture(7)])
    spins.stop.set()
    one.close(10)


@pytest.mark.parametrize("name", ["batch_seconds", "load_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_bounds_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive seconds"), live({"level": Level()}, **{name: value}):
        pass
