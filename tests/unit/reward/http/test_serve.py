"""What `unirl serve-reward` reads, refuses and starts; a scorer that fails its examples is not served."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.unit.reward.http.level import Level
from tests.unit.reward.http.live import command, remote
from tests.unit.reward.samples import Rule, entry, generated, service
from unirl.config.compose import compose
from unirl.config.error import ConfigError
from unirl.config.load import load
from unirl.reward.http.config import Example, ServeConfig, ServedScorer
from unirl.reward.http.server import RewardServer, listening_socket
from unirl.reward.scorer import Scorer, ScorerInput

SERVED = """\
defaults:
  - /reward@_global_: digits
  - _self_
scorers:
  level: {scorer: {_target_: tests.unit.reward.http.level.Level, seconds: 0.05}}
port: 0
"""


def complaint(*examples: Example, scorer: Scorer, **settings: Any) -> str | None:
    """Why the server of a scorer with these examples has ended."""
    config = ServeConfig({"s": ServedScorer(scorer, examples=examples)}, port=0, **settings)
    with listening_socket(config) as listener:
        server = RewardServer(config)
        server.run(listener)
    return server.failure


def test_a_server_that_is_killed_and_started_again_costs_no_sample(tmp_path):
    sample = generated([f"prompt {row}" for row in range(60)])
    with contextlib.ExitStack() as second:
        with command(tmp_path, SERVED) as (process, url):
            rewards = service(r=remote(url, chunk=1, concurrency=2, tries=12, pause=0.3, seconds_in_all=60.0))

            def restart() -> None:
                time.sleep(0.3)
                process.kill()
                process.wait()
                second.enter_context(command(tmp_path, SERVED, port=int(url.rpartition(":")[2])))

            thread = threading.Thread(target=restart)
            thread.start()
            scores = rewards.score(sample)
            thread.join()
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    (by_second,) = (line for line in lines if line.startswith('unirl_reward_samples_total{outcome="score"'))
    assert 1 <= float(by_second.split()[1]) < 60
    assert process.returncode == -signal.SIGKILL
    assert scores.total.tolist() == service(r=Level()).score(sample).total.tolist()


def test_the_command_composes_its_file_and_ends_on_ctrl_c(tmp_path):
    with command(tmp_path, SERVED) as (process, url):
        picture = np.zeros((8, 8, 3), np.uint8)
        patient = remote(url, "digit", seconds_to_start=60.0, seconds_per_try=60.0, seconds_in_all=60.0)
        assert 0 <= patient.score([entry(picture, digit=3)])[0] <= 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_scorer_that_orders_its_examples_is_served_and_others_are_not(tmp_path):
    for level in (30, 200):
        Image.fromarray(np.full((4, 4, 3), level, np.uint8)).save(tmp_path / f"{level}.png")
    dark, light = Example(image=tmp_path / "30.png"), Example(image=tmp_path / "200.png")
    by_level = Rule(lambda one: float(one.picture[0, 0, 0]))
    wrong = "scorer s is not fit to be served: "
    assert complaint(dark, light, scorer=by_level) == (
        f"{wrong}the examples stand from the best to the worst, and got [30.0, 200.0]"
    )
    exact = dataclasses.replace(dark, score=31.0, tolerance=0.5)
    assert complaint(exact, scorer=by_level) == f"{wrong}example 0 must get 31.0 within 0.5, and got 30.0"
    assert complaint(light, scorer=Level()) == f"{wrong}s: example.0: no level"
    drawn = iter(range(100))
    assert "the same examples got [0.0], and then [1.0]" in str(
        complaint(dark, scorer=Rule(lambda _: float(next(drawn))))
    )


def test_a_scorer_whose_score_depends_on_the_batch_is_not_served():
    class OfBatch(Level):
        def score(self, samples: list[ScorerInput]) -> list[float]:
            return [len(samples) - row / 2 for row in range(len(samples))]

    assert "among the others and 1.0 alone" in str(complaint(Example("a"), Example("b"), scorer=OfBatch()))


def test_a_model_that_does_not_load_ends_the_server_with_its_cause():
    class Missing(Level):
        def prepare(self) -> None:
            raise FileNotFoundError("no weights in /models/clip")

    assert complaint(scorer=Missing()) == (
        "scorer s is not fit to be served: FileNotFoundError: no weights in /models/clip"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("host=0.0.0.0", "host 0.0.0.0 lets other machines in: name a token_variable"),
        ("token_variable=NO_SUCH_TOKEN", "NO_SUCH_TOKEN is not set"),
        ("max_batches=3", "unknown key of ServeConfig.*did you mean max_batch"),
        ("max_batch=0", "max_batch must be at least 1"),
        ("max_items=5000", "never fit in a queue"),
        ("port=70000", "port must be in"),
        ("scorers.level.processes=2", "takes effect under a time_limit only"),
        ("scorers.level.examples=[{image: nowhere.png}]", "there is no file nowhere.png"),
        ("scorers.level.weight=2", "unknown key of ServedScorer"),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path, override, words):
    (tmp_path / "serve.yaml").write_text(SERVED)
    assert load(ServeConfig, compose(str(tmp_path / "serve.yaml"))).host == "127.0.0.1"
    with pytest.raises(ConfigError, match=words):
        load(ServeConfig, compose(str(tmp_path / "serve.yaml"), [override]))
