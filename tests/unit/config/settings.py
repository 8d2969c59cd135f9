"""A small run config with every kind of field, and classes that a `_target_` may name, rightly or wrongly."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal


class Rule(ABC):
    @abstractmethod
    def pick(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class First(Rule):
    count: int = 1

    def pick(self) -> int:
        return self.count


@dataclasses.dataclass(frozen=True)
class Window(Rule):
    size: int
    move: Literal["progressive", "random"] = "progressive"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def pick(self) -> int:
        return self.size


@dataclasses.dataclass(frozen=True)
class SlowWindow(Window):
    stay: int = 25


class Unsettled(Rule):
    """Concrete, but no dataclass."""

    def pick(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = 32
    alpha: float = 64.0
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Optimizer:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    sharding: Literal["full", "no_shard"] = "full"
    lora: Lora | None = dataclasses.field(default_factory=Lora)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


@dataclasses.dataclass(frozen=True)
class Scorer:
    rule: Rule
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    steps: int
    seed: int | None = None
    resume: bool = False
    output: Path = Path("runs")


@dataclasses.dataclass(frozen=True)
class Config:
    run: Run
    optimizer: Optimizer
    rule: Rule = dataclasses.field(default_factory=First)
    scorers: dict[str, Scorer] = dataclasses.field(default_factory=dict[str, Scorer])
    warmup: int | Literal["auto"] = "auto"
    rules: tuple[Rule, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if isinstance(self.warmup, int) and self.warmup > self.run.steps:
            raise ValueError(f"warmup of {self.warmup} steps does not fit a run of {self.run.steps}; lower it")


HERE = __name__


def full() -> dict[str, Any]:
    """Plain data with a value for every level."""
    return {
        "run": {"name": "x", "steps": 10, "seed": 0, "resume": True, "output": "out"},
        "optimizer": {
            "lr": 1,
            "betas": [0.9, 1],
            "sharding": "no_shard",
            "lora": {"rank": 8, "targets": ["to_q", "to_k"]},
        },
        "rule": {"_target_": f"{HERE}.Window", "size": 4},
        "scorers": {"a": {"rule": {"_target_": f"{HERE}.First"}, "weight": 2}},
        "warmup": 3,
        "rules": [{"_target_": f"{HERE}.First"}, {"_target_": f"{HERE}.SlowWindow", "size": 2}],
        "extra": {"anything": [1, None]},
    }


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """Root of a domain of the tests."""

    domain: Literal["tiny"]
    run: Run
    rule: Rule
