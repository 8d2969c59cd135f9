"""A whole trainer whose weights are one number, for the loop around the step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unirl.distributed.group.placement import Slab
from unirl.observability.metrics import read
from unirl.trainer.base import CommonConfig, Trainer
from unirl.trainer.evaluation import Evaluation
from unirl.trainer.run import LoggingConfig, RunConfig
from unirl.types.media import Media
from unirl.types.metric import Metrics, mean


def config(output: Path, steps: int, **settings: Any) -> CommonConfig:
    run = RunConfig(name="run", steps=steps, seed=0, output=output, **settings)
    return CommonConfig(run=run, logging=LoggingConfig(trackers=()))


@dataclasses.dataclass(frozen=True)
class Events:
    """What happens in a step of a given number and in the set-up; what an evaluation after that many steps says."""

    in_step: dict[int, Callable[[], None]] = dataclasses.field(default_factory=dict)
    in_setup: Callable[[], None] = lambda: None
    scores: dict[int, float] = dataclasses.field(default_factory=dict)


class Counting(Trainer):
    """Step n adds n + 1 and what the global random streams give; evaluations draw from these streams as well."""

    def __init__(self, common: CommonConfig, events: Events | None = None) -> None:
        super().__init__(common)
        self.events = events or Events()
        self.trained: list[int] = []
        self.drawn: list[tuple[float, float, float]] = []

    def setup(self, slab: Slab) -> None:
        self.total, self.done = torch.zeros(1), 0
        self.events.in_setup()

    def step(self, number: int) -> Metrics:
        if number in self.events.in_step:
            self.events.in_step[number]()
        self.trained.append(number)
        self.done = number + 1
        self.total = self.total + number + 1
        self.drawn.append(draws())
        return {"train/total": mean(float(self.total), 1.0)}

    def evaluate(self) -> Evaluation | None:
        noise = draws()
        metrics = {"eval/reward": self.events.scores[self.done], "eval/noise": noise[0]}
        return Evaluation(metrics, Media(texts=["a number"]), torch.zeros(1), ["count"])

    def evaluation_due(self, done: int) -> bool:
        return done in self.events.scores

    def state(self) -> dict[str, Any]:
        return {"counter": {"total": self.total}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.total = state["counter"]["total"]


def draws() -> tuple[float, float, float]:
    """One number of each global stream."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def lines(output: Path) -> list[dict[str, float]]:
    """metrics.jsonl without its times."""
    return [
        {name: value for name, value in line.items() if not name.startswith("seconds/")}
        for line in read(output / "run" / "metrics.jsonl")
    ]


def saved(output: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step_")) for path in (output / "run" / "checkpoints").iterdir())
