"""A scorer over HTTP gives the numbers of the same scorer in the run, bit for bit, whatever a batch is made of."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math

import httpx
import numpy as np
import pytest

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.samples import Rule, answered, cause, entry, generated, service, wrote
from unirl.config.load import dump, load
from unirl.reward.http import protocol
from unirl.reward.http.client import Server
from unirl.reward.http.config import ServedScorer
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.exact_match import ExactMatch
from unirl.reward.scorers.jpeg import JpegIncompressibility
from unirl.reward.scorers.remote import RemoteScorer
from unirl.reward.service import WeightedScorer
from unirl.reward.version import version_of


def pictures(count: int, height: int = 24, width: int = 40) -> list[ScorerInput]:
    rng = np.random.default_rng(0)
    return [entry(rng.integers(0, 200, (height, width, 3), dtype=np.uint8)) for _ in range(count)]


def test_scores_over_http_equal_those_of_the_local_service_bit_for_bit():
    sample = generated([f"prompt {row}" for row in range(37)])
    with live({"level": Level(), "jpeg": JpegIncompressibility()}) as url:
        over = service(a=remote(url), b=remote(url, "jpeg")).score(sample)
    local = service(a=Level(), b=JpegIncompressibility()).score(sample)
    assert over.total.tolist() == local.total.tolist()
    assert over.components["b"].tolist() == local.components["b"].tolist()


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_no_chunk_changes_a_score_or_its_place(chunk):
    samples = pictures(11)
    with live({"level": Level()}) as url:
        assert remote(url, chunk=chunk).score(samples) == Level().score(samples)


def test_all_that_a_sample_holds_arrives():
    seen: list[ScorerInput] = []
    sample = ScorerInput(
        id="r0.p1/2",
        prompt="ein Apfel \u00e4\U0001f34e",
        image=np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::2],
        source=np.arange(18, dtype=np.uint8).reshape(3, 2, 3),
        video=np.arange(36, dtype=np.uint8).reshape(3, 2, 2, 3),
        fps=12.5,
        audio=np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4),
        audio_rate=16000,
        text="",
        metadata={"answer": ["a", 1, 2.5, None, {"x": True}], "n": -(2**40)},
    )
    with live({"see": Rule(lambda one: seen.append(one) or 0.0)}) as url:
        assert remote(url, "see").score([sample]) == [0.0]
    (got,) = seen
    for name in ("id", "prompt", "text", "metadata", "fps", "audio_rate"):
        assert vars(got)[name] == vars(sample)[name]
    for name in ("image", "source", "video", "audio"):
        np.testing.assert_array_equal(vars(got)[name], vars(sample)[name], strict=True)
        assert not vars(got)[name].flags.writeable


def test_a_sample_without_score_is_invalid_with_its_cause_and_costs_no_other():
    samples = pictures(8)
    for row, level in ((2, 199), (4, 200), (5, 201)):
        samples[row] = entry(np.full((24, 40, 3), level, np.uint8))
    with live({"level": Level(bad=(199,))}) as url:
        scores = remote(url).score(samples)
    assert [row for row, score in enumerate(scores) if math.isnan(score)] == [2, 4, 5]
    assert cause(scores[2]) == "RuntimeError: a bad level"
    assert cause(scores[4]) == "no level"
    assert cause(scores[5]) == "the score is inf (prompt '')"


def test_a_sample_that_has_no_form_on_the_wire_is_invalid_alone():
    samples = [wrote("7"), wrote("7", answer=object()), wrote("7", answer=2**70), wrote("\ud800"), wrote("7")]
    with live({"long": Rule(lambda one: len(one.written))}) as url:
        scores = remote(url, "long").score(samples)
    assert [scores[0], scores[4]] == [1.0, 1.0]
    assert all("wire" in cause(score) or "surrogates" in cause(score) for score in scores[1:4])


def test_a_scorer_that_returns_too_few_scores_says_so():
    @dataclasses.dataclass(frozen=True)
    class TooFew(Scorer):
        def score(self, samples: list[ScorerInput]) -> list[float]:
            return [1.0]

    with live({"few": TooFew()}) as url:
        scores = remote(url, "few").score([wrote("a"), wrote("b")])
    assert "scorer few returned 1 scores for 2 samples" in cause(scores[0])


def test_equal_settings_are_one_version_and_others_another():
    assert version_of(JpegIncompressibility(95)) == version_of(JpegIncompressibility())
    assert version_of(JpegIncompressibility(95)) != version_of(JpegIncompressibility(75))


def test_many_clients_share_batches_and_nobody_gets_the_score_of_another():
    level = Level(seconds=0.02)
    with live({"level": level}, max_batch=8) as url, concurrent.futures.ThreadPoolExecutor(8) as pool:
        groups = [[entry(np.full((2, 2, 3), 10 * who + k, np.uint8)) for k in range(3)] for who in range(8)]
        scores = list(pool.map(lambda group: remote(url, chunk=1).score(group), groups))
    assert scores == [[(10 * who + k) / 7 for k in range(3)] for who in range(8)]
    assert sum(level.calls) == 24
    assert max(level.calls) <= 8
    assert len(level.calls) < 24


def test_pictures_of_other_sizes_share_no_batch():
    shapes: list[set[tuple[int, ...]]] = []

    @dataclasses.dataclass(frozen=True)
    class Shapes(Scorer):
        def score(self, samples: list[ScorerInput]) -> list[float]:
            shapes.append({sample.picture.shape for sample in samples})
            return [1.0 for _ in samples]

    samples = [entry(np.zeros((size, 4, 3), np.uint8)) for size in (1, 2, 1, 3, 2, 1)]
    with live({"shapes": Shapes()}) as url:
        assert remote(url, "shapes").score(samples) == [1.0] * 6
    assert sorted(map(sorted, shapes)) == [[(1, 4, 3)], [(2, 4, 3)], [(3, 4, 3)]]


def test_a_scorer_that_spins_is_stopped_and_the_others_keep_their_scores():
    samples = [entry(np.full((2, 2, 3), level, np.uint8)) for level in (7, 202, 14)]
    served = {"spins": ServedScorer(Level(), time_limit=1.0), "free": ServedScorer(Level())}
    with live(served) as url:
        scores = remote(url, "spins", seconds_per_try=60.0, seconds_in_all=60.0).score(samples)
        assert remote(url, "free").score(samples[:1]) == [1.0]
    assert [scores[0], scores[2]] == [1.0, 2.0]
    assert cause(scores[1]) == "not scored within the time limit of 1 s"


def test_the_texts_of_a_language_model_are_scored_with_the_metadata_of_their_row():
    sample = answered(["7", "8", "9"], [{"answer": "7"}, {"answer": ["8", "eight"]}, {"answer": "no"}])
    with live({"match": ExactMatch()}) as url:
        assert service(m=remote(url, "match")).score(sample).total.tolist() == [1.0, 1.0, 0.0]


def test_two_servers_share_the_chunks_and_one_that_is_gone_costs_no_sample():
    first, second, samples = Level(), Level(), pictures(12)
    with live({"level": first}) as one, live({"level": second}) as other:
        both = RemoteScorer(Server((one, other), chunk=2, pause=0.01), "level")
        assert both.score(samples) == Level().score(samples)
        assert sum(first.calls) == sum(second.calls) == 6
    with live({"level": first}, port=int(one.rpartition(":")[2])):
        assert both.score(samples) == Level().score(samples)


def test_a_run_does_not_start_without_its_server_and_says_what_is_served():
    with live({"level": Level(), "jpeg": JpegIncompressibility()}) as url:
        with pytest.raises(
            ValueError, match=rf"scorer r: reward server {url} does not serve 'clip', it serves \['jpeg"
        ):
            service(r=remote(url, "clip"))
        with pytest.raises(ValueError, match=f"serve version '{version_of(Level())}' of 'level', not 'Level/2'"):
            service(r=remote(url, version="Level/2"))
    with pytest.raises(ValueError, match=rf"reward server {url} does not serve 'level': ConnectError.*try 3 of 3"):
        service(r=remote(url))


def test_a_scorer_that_is_only_logged_keeps_no_run_from_starting():
    gone = remote("http://127.0.0.1:9", tries=1)
    scores = service(r=Rule(lambda _: 2.0), watched=WeightedScorer(gone, required=False)).score(answered(["a"]))
    assert scores.total.tolist() == [2.0]
    assert math.isnan(scores.components["watched"].item())


def test_settings_load_from_a_recipe_and_are_checked():
    data = {"server": {"urls": ["http://127.0.0.1:8080"]}, "scorer": "clip"}
    scorer = load(RemoteScorer, data)
    assert load(RemoteScorer, dump(scorer)) == scorer
    for wrong, words in (
        ({"urls": []}, "at least one server"),
        ({"urls": ["ftp://127.0.0.1"]}, "url must read like"),
        ({"urls": ["http://localhost:p@127.0.0.1"]}, "user or a password"),
        ({"urls": ["http://127.0.0.1"], "chunk": 0}, "chunk and chunk_mb"),
        ({"urls": ["http://127.0.0.1"], "tries": 0}, "tries and concurrency"),
        ({"urls": ["http://127.0.0.1"], "token_variable": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN is not set"),
    ):
        with pytest.raises(ValueError, match=words):
            load(RemoteScorer, {"server": wrong, "scorer": "clip"})


def test_a_request_that_comes_again_gets_the_first_reply_and_costs_no_second_call():
    level = Level()
    sample = entry(np.full((2, 2, 3), 70, np.uint8))
    with live({"level": level}) as url:
        body = b"".join(protocol.request("level", [protocol.item(0, sample)]))
        headers = {protocol.KEY_HEADER: "k"}
        replies = [httpx.post(f"{url}/v1/score", content=body, headers=headers) for _ in range(3)]
        other = b"".join(protocol.request("level", [protocol.item(1, sample)]))
        assert httpx.post(f"{url}/v1/score", content=other, headers=headers).status_code == 422
    assert [protocol.parsed_reply(reply.content, "level", version_of(Level()), ["0"]) for reply in replies] == [
        [10.0]
    ] * 3
    assert level.calls == [1]


def test_figures_say_how_many_samples_were_scored_and_failed():
    samples = [entry(np.full((2, 2, 3), level, np.uint8)) for level in (1, 2, 200)]
    with live({"level": Level()}) as url:
        remote(url).score(samples)
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        about = json.loads(httpx.get(f"{url}/v1/scorers").text)
        assert httpx.get(f"{url}/healthz").status_code == httpx.get(f"{url}/readyz").status_code == 200
    assert 'unirl_reward_samples_total{outcome="score",scorer="level"} 2.0' in lines
    assert 'unirl_reward_samples_total{outcome="error",scorer="level"} 1.0' in lines
    assert 'unirl_reward_batch_size_sum{scorer="level"} 3.0' in lines
    assert about == {"protocol": 1, "ready": True, "scorers": {"level": {"version": version_of(Level())}}}
