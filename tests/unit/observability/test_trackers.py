"""Trackers: what TensorBoard reads back, what is refused at the start, what never stops a run."""

from __future__ import annotations

import logging
import math
import struct
import sys
from pathlib import Path

import pytest
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unirl.observability.trackers import Trackers, choose_trackers

CONFIG = {"run": {"name": "demo", "steps": 4}, "sampling": {"seed": None, "sde": [0, 1]}}


def as_float32(value: float) -> float:
    """What is left of a number in a TensorBoard file."""
    return struct.unpack("f", struct.pack("f", value))[0]


def written(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in written(folder).Scalars(name)]


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "demo", CONFIG)
    trackers.log({"reward/mean": 0.5, "train/kl": 1 / 3}, 1)
    trackers.log({"reward/mean": 0.75, "train/kl": math.nan, "eval/knn": 0.9}, 2)
    trackers.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.75)]
    assert scalars(tmp_path, "eval/knn") == [(2, as_float32(0.9))]
    first, second = scalars(tmp_path, "train/kl")
    assert first == (1, as_float32(1 / 3))
    assert math.isnan(second[1])


def test_tensorboard_shows_the_recipe(tmp_path: Path) -> None:
    Trackers(["tensorboard"], tmp_path, "demo", CONFIG).close()
    (event,) = written(tmp_path).Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("    run:\n      name: demo\n      steps: 4\n")


def test_a_resumed_run_hides_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    interrupted = Trackers(["tensorboard"], tmp_path, "demo", CONFIG)
    for step in (1, 2, 3):
        interrupted.log({"reward/mean": float(step)}, step)
    interrupted.close()
    resumed = Trackers(["tensorboard"], tmp_path, "demo", CONFIG, resumed_at=2)
    resumed.log({"reward/mean": 30.0}, 3)
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_is_on_by_default_and_none_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_trackers(None) == ("tensorboard",)
    assert choose_trackers([]) == ()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert choose_trackers(None) == ()
    trackers = Trackers(None, tmp_path, "demo", CONFIG)
    trackers.log({"x": 1.0}, 1)
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="tracker 'wandb' needs the package wandb: pip install wandb"):
        Trackers(["tensorboard", "wandb"], tmp_path, "demo", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_repeated_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown tracker 'tensorbord'; known are tensorboard, wandb, trackio, mlflow"):
        choose_trackers(["tensorbord"])
    with pytest.raises(ValueError, match="named twice"):
        choose_trackers(["tensorboard", "tensorboard"])


class Unreachable(GeneralTracker):
    """A tracker whose server went away."""

    name = "unreachable"
    requires_logging_directory = False
    calls = 0

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: object) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def finish(self) -> None:
        raise TimeoutError("still no route")


def test_a_tracker_that_fails_is_told_of_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "demo", CONFIG)
    broken = Unreachable()
    trackers._trackers = {"unreachable": broken, **trackers._trackers}
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log({"reward/mean": float(step)}, step)
        trackers.close()
    assert broken.calls == 3
    assert [record.getMessage() for record in caplog.records] == [
        "tracker unreachable failed and training goes on without it: ConnectionError('no route to host')"
    ]
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
