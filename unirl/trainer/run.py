"""Settings that every trainer shares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.observability.trackers import choose_trackers


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """name, output: the run's folder is `output/name`
    steps:        rollouts (or batches) to train on
    seed:         key of all noise, data order and initial adapters; a recipe's null is drawn and written down
    save_every:   steps between checkpoints; the last step is always saved
    max_restarts: how often a run that loses a worker goes on from one and the same checkpoint: a node that fails now
                  and then does not end it, what kills a worker at the same step each time does
    async_save:   train on while a checkpoint is written, from a copy in the memory of the host
    keep_last:    newest checkpoints to keep; keep_best: best ones by `best_metric` to keep beside them
    best_metric:  a figure of the evaluation, higher is better
    """

    name: str
    steps: int
    seed: int
    output: Path = Path("runs")
    save_every: int = 50
    async_save: bool = True
    keep_last: int = 2
    keep_best: int = 0
    max_restarts: int = 3
    best_metric: str = "eval/reward"

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "keep_last"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")
        for name in ("keep_best", "max_restarts"):
            if self.__dict__[name] < 0:
                raise ValueError(f"{name} must not be negative, got {self.__dict__[name]}")
        if self.name in ("", "..") or self.name != Path(self.name).name:
            raise ValueError(f"name must be a plain folder name, got {self.name!r}")

    def refuse_best_without_evaluation(self) -> None:
        """ValueError where checkpoints are to be compared by an evaluation that there is not."""
        if self.keep_best:
            raise ValueError(
                f"run.keep_best={self.keep_best} compares checkpoints by {self.best_metric}, a figure of the "
                "evaluation: set eval, or leave keep_best at 0"
            )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """trackers: names (tensorboard, wandb, trackio, mlflow); None takes TensorBoard where it is installed."""

    trackers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        choose_trackers(self.trackers)
