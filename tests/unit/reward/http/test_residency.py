"""Scorers that leave their device to others and come back: the same numbers, and nothing scored in between."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.unit.reward.http.level import Level, Process
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.http.test_model_over_http import Dot, weights
from tests.unit.reward.samples import entry, wrote
from unirl.reward.http.config import ServedScorer
from unirl.reward.scorer import Unscored

PICTURES = [entry(np.full((2, 2, 3), level, np.uint8)) for level in (7, 14)]


class Placed(torch.nn.Linear):
    """Where it was sent."""

    def to(self, place: str) -> torch.nn.Module:
        self.places = [*vars(self).get("places", []), place]
        return super().to(place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedDot(Dot):
    def load(self, device: torch.device, dtype: torch.dtype) -> torch.nn.Linear:
        model = Placed(3, 1, bias=False)
        model.load_state_dict(super().load(device, dtype).state_dict())
        return model.eval()


def post(url: str, body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/residency", json=body)


def test_asleep_it_says_so_and_refuses_and_awake_it_gives_the_scores_of_before(tmp_path):
    dot = Dot(checkpoint=weights(tmp_path, 0.1))
    with live({"dot": dot, "level": Level()}) as url:
        scorer = remote(url, "dot", tries=2)
        before = scorer.score(PICTURES)
        assert httpx.get(f"{url}/v1/residency").json() == {"state": "resident"}

        scorer.sleep()
        assert httpx.get(f"{url}/v1/residency").json() == {"state": "offloaded"}
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "why": "the scorers are offloaded"})
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/v1/scorers").json()["ready"] is False
        selftest = httpx.post(f"{url}/v1/selftest")
        assert (selftest.status_code, selftest.headers["Retry-After"]) == (503, "1")
        (refused, _) = remote(url, "dot", str(dot.version()), tries=1, seconds_to_start=0.1).score(PICTURES)
        assert isinstance(refused, Unscored)
        (refused, _) = scorer.score(PICTURES)
        assert isinstance(refused, Unscored)
        assert refused.cause.startswith(f'{url}: status 503: \'{{"error":"the scorers are offloaded"}}\' (try 2 of 2)')

        scorer.wake()
        assert httpx.get(f"{url}/readyz").json() == {"ready": True}
        assert scorer.score(PICTURES) == before
        assert len(dot.loads) == 1


def test_a_model_goes_to_the_cpu_and_back_to_its_device(tmp_path):
    dot = PlacedDot(checkpoint=weights(tmp_path, 0.1), device="cpu")
    dot.sleep()
    before = dot.score(PICTURES)
    dot.sleep()
    dot.wake()
    assert dot.score(PICTURES) == before
    (model,) = dot.modules(dot._loaded)
    assert vars(model)["places"] == ["cpu", "cpu"]
    assert dot.loads == [dot.checkpoint]


@pytest.mark.gpu
def test_a_model_asleep_holds_nothing_of_a_gpu(tmp_path):
    dot = Dot(checkpoint=weights(tmp_path, 0.1), device="cuda")
    before, used = dot.score(PICTURES), torch.cuda.memory_allocated()
    dot.sleep()
    assert torch.cuda.memory_allocated() < used
    dot.wake()
    assert dot.score(PICTURES) == before


def test_a_sample_that_comes_while_all_sleep_is_scored_when_they_wake():
    with live({"level": Level()}) as url:
        scorer = remote(url, tries=100, seconds_in_all=30.0)
        scorer.connect()
        scorer.sleep()
        waking = threading.Timer(0.5, scorer.wake)
        waking.start()
        assert scorer.score(PICTURES) == [1.0, 2.0]
        waking.join()


def test_what_waits_is_scored_before_they_sleep():
    level = Level(seconds=0.2)
    with live({"level": level}, max_batch=1) as url:
        scorer, scores = remote(url), list[float]()
        scorer.connect()
        asking = threading.Thread(target=lambda: scores.extend(scorer.score(PICTURES)))
        asking.start()
        while not level.calls:
            time.sleep(0.01)
        scorer.sleep()
        asking.join()
    assert scores == [1.0, 2.0]
    assert level.calls == [1, 1]


def test_processes_of_a_time_limit_end_and_others_start():
    with live({"own": ServedScorer(Process(), time_limit=30.0)}) as url:
        scorer, sample = remote(url, "own", seconds_per_try=30.0), wrote(sys.prefix)
        (first,) = scorer.score([sample])
        scorer.sleep()
        assert not Path(f"/proc/{first:.0f}").exists()
        scorer.wake()
        (second,) = scorer.score([sample])
    assert first != second > 0
    assert not Path(f"/proc/{second:.0f}").exists()


def test_what_does_not_wake_stays_asleep_and_says_why():
    class Tired(Level):
        def wake(self) -> None:
            raise MemoryError("the device is full")

    with live({"level": Tired()}) as url:
        scorer = remote(url, tries=2)
        scorer.sleep()
        with pytest.raises(RuntimeError, match=f"reward server {url} are not resident: status 500: .*MemoryError: the"):
            scorer.wake()
        assert httpx.get(f"{url}/v1/residency").json() == {"state": "offloaded"}


def test_a_move_is_bounded_in_time():
    woken = threading.Event()

    class Slow(Level):
        def wake(self) -> None:
            woken.wait(30)

    with live({"level": Slow()}, load_seconds=1) as url:
        assert post(url, {"state": "offloaded"}).status_code == 200
        late = post(url, {"state": "resident"})
        woken.set()
        assert (late.status_code, late.json()) == (504, {"error": "not resident after load_seconds=1"})
        assert post(url, {"state": "resident"}).json() == {"state": "resident"}


@pytest.mark.parametrize("body", [{}, {"state": "asleep"}, [], {"state": "resident", "more": 1}])
def test_another_state_is_refused(body):
    with live({"level": Level()}) as url:
        response = post(url, body)
        assert remote(url).score(PICTURES) == [1.0, 2.0]
    assert response.status_code == 400
    assert 'the body is {"state": "resident"} or {"state": "offloaded"}' in response.json()["error"]


def test_it_takes_the_token_of_the_other_end_points(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret-1")
    with live({"level": Level()}, token_variable="REWARD_TOKEN") as url:
        assert post(url, {"state": "offloaded"}).status_code == 401
        assert httpx.get(f"{url}/v1/residency").status_code == 401
        remote(url, token_variable="REWARD_TOKEN").sleep()
        assert httpx.get(f"{url}/readyz").status_code == 503
