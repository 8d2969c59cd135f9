"""The scorers of a server: loaded, tried on their examples, asked, and put aside while others need the device.

    loading -> resident <-> offloaded

Those without processes of their own share one thread, and so one device.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from unirl.config.load import dump
from unirl.reward.http import selftest
from unirl.reward.http.batching import Batch, Lane, Overdue
from unirl.reward.http.config import ServeConfig, ServedScorer
from unirl.reward.http.other_python import OtherPython
from unirl.reward.model_scorer import ModelScorer
from unirl.reward.outcome import Outcome
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.time_limit import TimeLimited
from unirl.reward.version import by_settings, version_of

_log = logging.getLogger(__name__)
_END_SECONDS = 5  # for what is in work when the server stops
T = TypeVar("T")

Residency = Literal["resident", "offloaded"]


class NotReady(Exception):
    """The scorers are loading, or put aside."""


class Fleet:
    """`versions` by scorer, once it is loaded and has passed its examples."""

    def __init__(self, config: ServeConfig, done: Callable[[Batch], None]) -> None:
        self.config, self._done = config, done
        self.versions: dict[str, str] = {}
        self.state: Literal["loading"] | Residency = "loading"
        self._lanes: dict[str, Lane] = {}
        self._arriving, self._moving = 0, asyncio.Lock()

    @property
    def waiting(self) -> int:
        """Samples in the queues."""
        return sum(lane.waiting for lane in self._each_lane())

    def obstacle(self) -> str:
        """Why nothing can be scored now; nothing when all can."""
        if self.state != "resident":
            return f"the scorers are {self.state}"
        return next((late for lane in self._each_lane() if (late := lane.overdue())), "")

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is on its way in: a batch that is not full waits for it, `max_wait_ms` at most."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    async def load(self) -> str | None:
        """Lanes, models and examples; why a scorer is not fit to be served."""
        scorers = self.config.scorers
        shared = {name: served.scorer for name, served in scorers.items() if not served.apart}
        if shared:
            self._lanes.update(dict.fromkeys(shared, self._lane(dict(shared), self.config.batch_seconds)))
        for name, served in scorers.items():
            if served.apart:
                self._lanes[name] = self._lane({name: self._apart(name, served)}, math.inf)
        for name in scorers:
            try:
                async with asyncio.timeout(self.config.load_seconds):
                    version = await self._version(name)
                wrong = await self._complaint(name)
            except TimeoutError:
                version, wrong = "", f"it is not loaded after load_seconds={self.config.load_seconds:g}"
            except Exception as error:  # noqa: BLE001 - scorers are anybody's code; told to who started the server
                _log.exception("scorer %s", name)
                version, wrong = "", f"{type(error).__name__}: {error}"
            if wrong is not None:
                return f"scorer {name} is not fit to be served: {wrong}"
            self.versions[name] = version
        self.state = "resident"
        return None

    async def outcomes(self, names: list[str], samples: list[ScorerInput]) -> list[list[Outcome]]:
        """Of the samples, scorer by scorer; NotReady, or as `Lane.outcomes`."""
        if self.state != "resident":
            raise NotReady(self.obstacle())
        return await asyncio.gather(*(self._lanes[name].outcomes(name, samples) for name in names))

    async def complaints(self) -> dict[str, str | None]:
        """What is wrong with each scorer by its examples; NotReady."""
        if self.state != "resident":
            raise NotReady(self.obstacle())
        return {name: await self._complaint(name) for name in self.config.scorers}

    async def move(self, to: Residency) -> None:
        """Models to the CPU and back; processes end and start. What waits is scored before, what comes then is not.

        NotReady while they load or are stuck, Overdue after `load_seconds`; what a scorer raises leaves it offloaded.
        """
        if self.state == "loading" or (self.state == "resident" and self.obstacle()):
            raise NotReady(self.obstacle())
        try:
            async with asyncio.timeout(self.config.load_seconds), self._moving:
                if to == self.state:
                    return
                self.state = "offloaded"
                for name, lane in self._lanes.items():
                    await self._moved(name, lane, to)
                self.state = to
        except TimeoutError:
            raise Overdue(f"not {to} after load_seconds={self.config.load_seconds:g}") from None

    async def close(self) -> None:
        for lane in self._each_lane():
            await asyncio.to_thread(lane.close, _END_SECONDS)

    async def _moved(self, name: str, lane: Lane, to: Residency) -> None:
        runner = lane.scorers[name]
        if isinstance(runner, Scorer) and not isinstance(runner, OtherPython):
            await _on(lane, runner.sleep if to == "offloaded" else runner.wake)
        elif to == "offloaded":
            await _on(lane, runner.close)
        else:
            self.versions[name] = await self._version(name)

    async def _version(self, name: str) -> str:
        """Found on the thread that will run the scorer; what has a time limit is loaded by its own processes only."""
        lane, served = self._lanes[name], self.config.scorers[name]
        if isinstance(runner := lane.scorers[name], OtherPython):
            return await _on(lane, lambda: runner.version)
        if isinstance(runner, TimeLimited):
            return by_settings(served.scorer)
        return await _on(lane, lambda: version_of(served.scorer))

    async def _complaint(self, name: str) -> str | None:
        """Of the examples of a scorer: all of them twice, then each alone."""
        examples = self.config.scorers[name].examples
        if not examples:
            return None
        lane, samples = self._lanes[name], selftest.inputs(examples)
        runs = [await lane.outcomes(name, samples) for _ in range(2)]
        alone = [(await lane.outcomes(name, [sample]))[0] for sample in samples]
        return selftest.complaint(examples, runs, alone)

    def _apart(self, name: str, served: ServedScorer) -> TimeLimited | OtherPython:
        """What runs a scorer that has processes of its own, and bounds in time of its own."""
        if served.python is not None:
            section = dump(served) | {"python": None, "examples": []}
            return OtherPython(name, served.python, section, self.config.batch_seconds)
        assert served.limit is not None
        return TimeLimited(name, served.scorer, served.limit, served.processes)

    def _lane(self, scorers: dict[str, Scorer | TimeLimited], batch_seconds: float) -> Lane:
        return Lane(
            scorers,
            max_batch=self.config.max_batch,
            max_wait=self.config.max_wait_ms / 1000,
            max_queue=self.config.max_queue,
            batch_seconds=batch_seconds,
            coming=lambda: self._arriving > 0,
            done=self._done,
        )

    def _each_lane(self) -> list[Lane]:
        return list({id(lane): lane for lane in self._lanes.values()}.values())


async def _on(lane: Lane, function: Callable[[], T]) -> T:
    return await asyncio.wrap_future(lane.call(function))


def described(scorer: Scorer) -> dict[str, Any]:
    """Its card."""
    return dataclasses.asdict(scorer.card) if isinstance(scorer, ModelScorer) else {}
