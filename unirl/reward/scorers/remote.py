"""A scorer that a reward server holds: on another device, another machine, or in another Python environment."""

from __future__ import annotations

import dataclasses
import functools

from unirl.reward.http.client import Server
from unirl.reward.scorer import Scorer, ScorerInput, Unscored


@dataclasses.dataclass(frozen=True)
class RemoteScorer(Scorer):
    """What `unirl serve-reward` serves under the name `scorer`: same numbers, range and unit as of that scorer.

    version: what must be served, as `/v1/scorers` shows it; None takes what is there when the run starts. A server that
             comes back with another version gives no more scores: a reward that changes within a run is two rewards
    """

    server: Server
    scorer: str
    version: str | None = None

    def __post_init__(self) -> None:
        if not self.scorer:
            raise ValueError("scorer: name one that the server serves")

    def connect(self) -> None:
        _ = self.served_version

    def score(self, samples: list[ScorerInput]) -> list[float]:
        try:
            version = self.served_version
        except ValueError as error:
            return [Unscored(str(error)) for _ in samples]
        return self.server.scores(self.scorer, version, samples)

    def sleep(self) -> None:
        self.server.sleep()

    def wake(self) -> None:
        self.server.wake()

    def close(self) -> None:
        self.server.close()

    @functools.cached_property
    def served_version(self) -> str:
        """What the server says that it serves. ValueError where it is not there, or serves something else."""
        served = self.server.version(self.scorer)
        if self.version not in (None, served):
            raise ValueError(f"the reward servers serve version {served!r} of {self.scorer!r}, not {self.version!r}")
        return served
