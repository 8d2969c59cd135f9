"""A reward server of this process on a free port, and scorers that tests serve."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

from unirl.reward.http.client import Server
from unirl.reward.http.config import ServeConfig, ServedScorer
from unirl.reward.http.server import RewardServer, listening_socket
from unirl.reward.scorer import Scorer, ScorerInput, Unscored
from unirl.reward.scorers.remote import RemoteScorer


@dataclasses.dataclass(frozen=True)
class Level(Scorer):
    """The level of the first pixel / 7; levels of `bad` raise, 200 has no score, 201 is infinite, 202 spins."""

    bad: tuple[int, ...] = ()
    seconds: float = 0.0
    calls: list[int] = dataclasses.field(default_factory=list)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        self.calls.append(len(samples))
        time.sleep(self.seconds)
        levels = [int(sample.picture[0, 0, 0]) for sample in samples]
        if set(levels) & set(self.bad):
            raise RuntimeError("a bad level")
        while 202 in levels:
            pass
        return [{200: Unscored("no level"), 201: math.inf}.get(level, level / 7) for level in levels]


@contextlib.contextmanager
def live(scorers: dict[str, Scorer | ServedScorer], **settings: Any) -> Iterator[str]:
    """The URL of a server of `scorers`."""
    served = {name: one if isinstance(one, ServedScorer) else ServedScorer(one) for name, one in scorers.items()}
    config = ServeConfig(served, port=settings.pop("port", 0), **settings)
    with listening_socket(config) as listener:
        server = RewardServer(config)
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(20)
            assert not thread.is_alive()


def remote(url: str, scorer: str = "level", version: str | None = None, **settings: Any) -> RemoteScorer:
    fast = {"pause": 0.01, "seconds_per_try": 5.0, "seconds_in_all": 20.0, "seconds_to_start": 5.0, **settings}
    return RemoteScorer(Server((url,), **fast), scorer, version)
