"""The same numbers in TensorBoard, Weights & Biases, Trackio or MLflow, through accelerate's tracker classes.

None is required. TensorBoard is on by default where it is installed; it writes to `<run>/tensorboard`, so that
`tensorboard --logdir runs` shows all runs side by side.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unirl.observability.flatten import flatten
from unirl.observability.run_folder import RunFolder

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "unirl"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Start:
    """What a tracker is started with. folder: of the run; resumed_at: the step training goes on from, 0 at first."""

    folder: Path
    run_name: str
    config: Mapping[str, Any]
    resumed_at: int


class Trackers:
    """Logs to every named tracker. Made once, in the driver process, before training.

    names:      of `KNOWN_TRACKERS`; None means TensorBoard if it is installed
    folder:     the run's folder, opened before (`RunFolder.open`)
    config:     the resolved recipe, as nested plain dicts
    resumed_at: the checkpoint's step on resume; TensorBoard hides what an interrupted run logged after it

    Raises ValueError for an unknown name and for a missing package, with the command that installs it. What a tracker
    raises while it starts (no login, no server) goes up too; once training runs, a tracker can no longer stop it.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        resumed_at: int = 0,
    ) -> None:
        chosen = choose_trackers(names)
        self._warned: set[str] = set()
        self._trackers: dict[str, GeneralTracker] = {}
        if not chosen:
            return
        from accelerate import PartialState

        # accelerate's logger needs this state, and by itself would set up a CUDA context in the driver for it.
        PartialState(cpu=True)
        start = _Start(folder, run_name, config, resumed_at)
        for name in chosen:
            self._trackers[name] = _KNOWN[name].start(start)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the figures of a step. A failing tracker is told of once and tried again at the next step."""
        for name, tracker in self._trackers.items():
            self._tolerate(name, lambda tracker=tracker: tracker.log(dict(metrics), step=step))

    def close(self) -> None:
        """Flush and end every tracker."""
        for name, tracker in self._trackers.items():
            self._tolerate(name, tracker.finish)
        self._trackers = {}

    def _tolerate(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a copy of the numbers must never stop a run
            # A tracker is someone else's code and often a network away: whatever it raises, days of training weigh more
            # than a copy of numbers that metrics.jsonl already holds.
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("tracker %s failed and training goes on without it: %r", name, error)


def choose_trackers(names: Sequence[str] | None) -> tuple[str, ...]:
    """The trackers that `names` asks for, checked without importing them; None means TensorBoard if it is installed."""
    if names is None:
        return ("tensorboard",) if _installed(_KNOWN["tensorboard"].packages) else ()
    for name in names:
        if name not in _KNOWN:
            raise ValueError(f"unknown tracker {name!r}; known are {', '.join(KNOWN_TRACKERS)}")
        if not _installed(_KNOWN[name].packages):
            package = _KNOWN[name].packages[0]
            raise ValueError(f"tracker {name!r} needs the package {package}: pip install {package}, or leave it out")
    if len(set(names)) < len(names):
        raise ValueError(f"trackers are named twice: {list(names)}")
    return tuple(names)


def _installed(packages: tuple[str, ...]) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


def _start_tensorboard(start: _Start) -> GeneralTracker:
    from accelerate.tracking import TensorBoardTracker

    # purge_step hides events of that step and later ones, which a run that was killed after its checkpoint has logged.
    purge = {"purge_step": start.resumed_at + 1} if start.resumed_at else {}
    tracker = TensorBoardTracker("tensorboard", start.folder, **purge)
    _begin(tracker)
    if not start.resumed_at:
        # Text, because store_init_configuration would add a run of its own, named after the clock, at every start.
        text = yaml.safe_dump(dict(start.config), sort_keys=False)
        tracker.log({"config": "\n".join(f"    {line}" for line in text.splitlines())}, step=0)
    return tracker


def _start_wandb(start: _Start) -> GeneralTracker:
    from accelerate.tracking import WandBTracker

    # The id makes a resumed run go on as the same one, and a run that took over the name of a deleted one start anew.
    identity = RunFolder(start.folder.parent, start.folder.name).read_info()["id"]
    tracker = WandBTracker(PROJECT, name=start.run_name, id=identity, dir=start.folder, resume="allow")
    return _begin(tracker, start.config)


def _start_trackio(start: _Start) -> GeneralTracker:
    from accelerate.tracking import TrackioTracker

    return _begin(TrackioTracker(PROJECT, name=start.run_name, resume="allow"), start.config)


def _start_mlflow(start: _Start) -> GeneralTracker:
    from accelerate.tracking import MLflowTracker

    return _begin(MLflowTracker(PROJECT, run_name=start.run_name), start.config)


def _begin(tracker: GeneralTracker, config: Mapping[str, Any] | None = None) -> GeneralTracker:
    # Only the driver makes trackers, so there is no other process to keep quiet.
    tracker.main_process_only = False
    tracker.start()
    if config is not None:
        tracker.store_init_configuration({name: _plain(value) for name, value in flatten(config).items()})
    return tracker


def _plain(value: Any) -> bool | int | float | str | None:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@dataclasses.dataclass(frozen=True)
class _Known:
    """packages: any of these makes the tracker work, the first is the one to install."""

    packages: tuple[str, ...]
    start: Callable[[_Start], GeneralTracker]


_KNOWN = {
    "tensorboard": _Known(("tensorboard", "tensorboardX"), _start_tensorboard),
    "wandb": _Known(("wandb",), _start_wandb),
    "trackio": _Known(("trackio",), _start_trackio),
    "mlflow": _Known(("mlflow",), _start_mlflow),
}
KNOWN_TRACKERS = tuple(_KNOWN)
