"""What every trainer does around its step: resume, evaluate, log, save, report."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, final

import torch

from unirl.algorithms.base import Algorithm, Progress
from unirl.config.error import ConfigError, refusals
from unirl.config.load import dump
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement, Slab
from unirl.models.base import Family
from unirl.observability.metrics import MetricsLog
from unirl.observability.progress import ProgressLine
from unirl.observability.report import write_report
from unirl.observability.run_folder import RunFolder
from unirl.observability.timing import PhaseTimer
from unirl.observability.trackers import Trackers
from unirl.reward.outcome import BrokenScorerError
from unirl.train.backend.config import BackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.parallel import refuse_ranks
from unirl.train.checkpoint import CheckpointStore
from unirl.train.rng import isolated_rngs
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, Geometry
from unirl.trainer.evaluation import EvalConfig, Evaluation
from unirl.trainer.restarts import Restarts
from unirl.trainer.run import LoggingConfig, RunConfig
from unirl.trainer.saving import BackendPart, Saves
from unirl.types.metric import Metrics, values
from unirl.types.sample import Part
from unirl.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has saved; the same command continues it."""


@dataclasses.dataclass(frozen=True)
class CommonConfig:
    """What the loop itself reads of a run's configuration."""

    run: RunConfig
    placement: Placement = dataclasses.field(default_factory=Placement)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    @property
    def digests(self) -> dict[str, str]:
        """Of the prompts under these keys of the recipe: a run goes on only with those that it began with."""
        return {}


class TrainConfig(Protocol):
    """backend: weights and optimizer; geometry: how a batch is cut into updates and micro-batches."""

    @property
    def backend(self) -> BackendConfig[Any, Any]: ...

    @property
    def geometry(self) -> Geometry: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(CommonConfig):
    """A run that trains one policy."""

    model: Family
    algorithm: Algorithm[Any]
    train: TrainConfig
    sampling: SamplingParams
    eval: EvalConfig | None = None

    @property
    def digests(self) -> dict[str, str]:
        return {} if self.eval is None else {"eval.prompts": self.eval.prompts.digest}

    def check_batch(self, size: int) -> None:
        """ValueError where the ranks do not fit the model, or the geometry a batch of `size` samples."""
        self.train.geometry.check(size)
        place, sharding = self.placement, self.train.backend.sharding
        devices = 1 if place.launcher == "local" else place.devices
        refuse_ranks(self.model, sharding, place.axes, devices=devices, device_type=place.device)


class Trainer(ABC):
    """A run: `fit()` is the loop around `step`, which a domain writes."""

    def __init__(self, config: CommonConfig) -> None:
        self._common = config
        self.timer = PhaseTimer()

    @abstractmethod
    def setup(self, slab: Slab) -> None:
        """Spawn the workers; done anew where a run goes on after it lost one, so nothing of before may be left."""

    @abstractmethod
    def step(self, number: int) -> Metrics:
        """Train on rollout (or batch) `number`, counted from 0."""

    @abstractmethod
    def evaluate(self) -> Evaluation | None:
        """Evaluate the present weights, on a random stream of its own; None where the recipe has no evaluation."""

    @abstractmethod
    def evaluation_due(self, done: int) -> bool:
        """Whether to evaluate after `done` steps (0: before training)."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the step number: the parts of a checkpoint (CheckpointStore.start)."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, as CheckpointStore.load gives it back."""

    @final
    def fit(self) -> Path:
        """Train to the end and return the run's folder. Started again, the same command continues where it was.

        Raises Interrupted after a Ctrl-C or SIGTERM: the step under way is finished and saved first.
        """
        run = self._common.run
        config, digests = dump(self._common), self._common.digests
        with refusals():
            folder = RunFolder(run.output, run.name)
            folder.refuse_other(config, digests)  # before a lock is put there
        store = CheckpointStore(folder.checkpoints, keep_last=run.keep_last, keep_best=run.keep_best)
        with folder.held(), _stop_requests() as stop:
            with refusals():
                RunFolder.open(run.output, run.name, config=config, seed=run.seed, digests=digests)
            restarts = Restarts(run.max_restarts)
            while not self._trained(folder, store, stop, restarts):
                pass
        return folder.path

    def _trained(self, folder: RunFolder, store: CheckpointStore, stop: _StopRequests, restarts: Restarts) -> bool:
        """Train from the last checkpoint to the end; False where a worker was lost and may be replaced."""
        try:
            with refusals():
                slab = self._common.placement.slab(in_place_of=restarts.lost_slab)
            with slab:
                restarts.lost_slab = slab
                self._train(slab, folder, store, stop, restarts)
        except WorkerLostError as lost:
            if stop.requested:
                raise Interrupted(
                    f"{lost}, and is not replaced, as the run was to stop. {store.still_good()}"
                ) from lost
            restarts.count(lost, store.newest_step() or 0)
            return False
        return True

    def _train(
        self, slab: Slab, folder: RunFolder, store: CheckpointStore, stop: _StopRequests, restarts: Restarts
    ) -> None:
        run, config = self._common.run, dump(self._common)
        with refusals():
            self.setup(slab)
            resumed = self._resume(store)
        done, log = resumed or 0, MetricsLog(folder.metrics)
        log.truncate_after(-1 if resumed is None else resumed)
        trackers = Trackers(self._common.logging.trackers, folder.path, run.name, config, resumed_at=done)
        progress = ProgressLine(run.steps, plain_seconds=5.0)
        with _reported_at_the_end(folder.path), closing(trackers), closing(progress), Saves(store) as saves:
            if done == 0:
                with _resumable(store):
                    self._record(0, self._evaluated(0, folder), log, trackers, progress)
            for number in range(done, run.steps):
                with _resumable(store):
                    with self.timer("train"):
                        metrics = values(self.step(number))
                    metrics.update(self._evaluated(number + 1, folder))
                    metrics.update(restarts.metrics)
                    self._record(number + 1, metrics, log, trackers, progress)
                with self.timer("save"):
                    saves.settle()
                stopping = stop.requested  # read once: what is said to be saved must be
                last = stopping or number + 1 == run.steps
                if last or (number + 1) % run.save_every == 0:
                    with _resumable(store):
                        log.sync()  # a checkpoint builds on the lines before it
                    score, background = metrics.get(run.best_metric), run.async_save and not last
                    with self.timer("save"):
                        saves.start(number + 1, self.state(), score=score, background=background)
                if stopping and number + 1 < run.steps:
                    raise Interrupted(f"saved step {number + 1} of {run.steps}; the same command continues it")

    def _resume(self, store: CheckpointStore) -> int | None:
        """The step of the checkpoint that is taken over; None where there is none."""
        checkpoint = store.latest()
        if checkpoint is None:
            return None
        if checkpoint.step > self._common.run.steps:
            raise ConfigError(
                f"run.steps={self._common.run.steps}: the run has trained {checkpoint.step} steps already; ask for at "
                "least as many, or choose another run.name"
            )
        self.load_state(store.load(checkpoint, "cpu"))
        return checkpoint.step

    def _evaluated(self, done: int, folder: RunFolder) -> dict[str, float]:
        if not self.evaluation_due(done):
            return {}
        with self.timer("eval"), isolated_rngs(self._common.run.seed):
            evaluation = self.evaluate()
        if evaluation is None:
            return {}
        evaluation.save_media(folder, done)
        return evaluation.metrics

    def _record(
        self, step: int, metrics: dict[str, float], log: MetricsLog, trackers: Trackers, progress: ProgressLine
    ) -> None:
        metrics = {**metrics, **self.timer.lap()}
        log.append(step, metrics)
        trackers.log(metrics, step)
        progress.update(step, metrics, self.timer.left(self._common.run.steps - step))


def spawn_backend(
    slab: Slab,
    config: CommonConfig,
    model: Family,
    backend: BackendConfig[Any, Any],
    *,
    total_steps: int,
    with_reference: bool = False,
) -> Handle[FSDPBackend[Any, Any]]:
    """The backend of a run in every rank of `slab`, on the run's device and seed. total_steps: optimizer steps."""
    return slab.spawn(
        FSDPBackend,
        model,
        backend,
        device=torch.device(slab.device_type),
        seed=config.run.seed,
        total_steps=total_steps,
        with_reference=with_reference,
    )


class PolicyTrainer(Trainer):
    """A run of one policy. A subclass sets `backend` and `stack` in its setup."""

    backend: Handle[FSDPBackend[Any, Any]]
    stack: Handle[TrainStack]

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._policy = config

    @final
    def train(self, part: Part, number: int) -> Metrics:
        """All optimizer steps on `part`, which is rollout (or batch) `number`."""
        run = self._policy.run
        return self.stack.train(Batch.of(part, run.seed, self.stack.dp), Progress(number, run.steps))

    @final
    def evaluation_due(self, done: int) -> bool:
        return self._policy.eval is not None and self._policy.eval.due(done, self._policy.run.steps)

    @final
    def state(self) -> dict[str, Any]:
        return {"backend": BackendPart(self.backend)}

    @final
    def load_state(self, state: dict[str, Any]) -> None:
        self.backend.load(state["backend"])


def run(trainer: Trainer) -> int:
    """Fit, tell where the report is, and return the exit code of the program."""
    return reported(lambda: f"report: {trainer.fit() / 'report.html'}")


def reported(work: Callable[[], str]) -> int:
    """Do `work` and print what it says. What a user can mend, a full disk, a stop: one line without a traceback."""
    try:
        said = work()
    except Interrupted as stop:
        return _ended(f"{stop}", 130)
    except KeyboardInterrupt:
        return _ended("stopped at once; the same command continues from the last checkpoint", 130)
    except ConfigError as error:
        sys.stderr.write(error.report())
        return 2
    except OSError as error:
        return _ended(f"error: {_reason(error)}", 1)
    except (FloatingPointError, WorkerLostError, BrokenScorerError) as error:
        return _ended(f"error: {error}", 1)
    sys.stdout.write(f"{said}\n")
    return 0


def _ended(line: str, code: int) -> int:
    sys.stderr.write(f"{line}\n")
    return code


def _reason(error: OSError) -> str:
    """Path and reason, without the number of the error."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


@contextmanager
def _reported_at_the_end(folder: Path) -> Iterator[None]:
    """The report of a run is written whatever ends it. Where it cannot be, it does not hide what stopped the run."""
    try:
        yield
    except BaseException:
        try:
            write_report(folder)
        except OSError as error:
            logger.warning("the report of %s could not be written: %s", folder, error)
        raise
    write_report(folder)


@contextmanager
def _resumable(store: CheckpointStore) -> Iterator[None]:
    """An OSError, such as a full disk, leaves the block with what is still good."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{_reason(error)}. {store.still_good()}") from error


class _StopRequests:
    requested = False


@contextmanager
def _stop_requests() -> Iterator[_StopRequests]:
    """Ctrl-C and SIGTERM ask for a stop after the present step; a second Ctrl-C stops at once."""
    stop = _StopRequests()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        sys.stderr.write("\nstopping after this step; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
