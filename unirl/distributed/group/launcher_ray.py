"""The launcher of many ranks: one Ray actor each.

A rank runs one call at a time, in the order in which the driver started them, and all ranks see the same order: two
siblings that talk to other ranks must not do so at once, since their collectives would meet in the wrong order. Those
that are `beside` never do, and have a lane of their own: it overlaps with the main one, as the driver does with its
slabs, and one slab with another.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from unirl.config.environment import worker_environment
from unirl.distributed.group.autopsy import cause_of_death, is_gone, stacks
from unirl.distributed.group.axes import Axes
from unirl.distributed.group.device_pool import DevicePool
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.launcher import Launcher, Pending, WorkerLostError, closed
from unirl.distributed.group.rank_actor import BESIDE, Failure, Outcome, Process, RankActor, Said, Shape
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.plane import DataPlane

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds after which a failure is noticed while other ranks go on
_AFTERMATH = 2.0  # seconds after a rank's failure in which others may still return
_SEARCH = 30.0  # the same where a rank failed for want of another one, which is to be named
_KILLED = 20.0  # seconds in which the system ends a process that was killed
_LIGHT = (type(None), bool, int, float, str)  # cheaper to send to every rank than to put
_RANKS_NAMED = 16
_SHOWN = 4  # ranks whose stacks are logged when a call takes too long


@dataclasses.dataclass
class _Lane:
    """Calls that run one after another.

    group:      the concurrency group of Ray in which they do; None is the default one
    unsettled:  those that nobody has waited for, in their order
    settling:   held by the thread of the driver that waits for the first of them
    idle_since: when the latest one was seen to end
    """

    group: str | None = None
    unsettled: collections.deque[_Started] = dataclasses.field(default_factory=collections.deque)
    settling: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    idle_since: float = dataclasses.field(default_factory=time.monotonic)


class RayLauncher(Launcher):
    """A slab of `devices` of the pool's devices.

    deadline: seconds that one call may take, counted from the end of the one before it in its lane; ranks wait for each
              other no longer, either
    plane:    what the ranks do with the heavy fields of arguments and results
    patient:  devices that the cluster has not yet are waited for, too
    """

    def __init__(
        self,
        slab: str,
        pool: DevicePool,
        devices: int,
        *,
        axes: Axes,
        deadline: float,
        plane: DataPlane,
        patient: bool = False,
    ) -> None:
        self.slab = slab
        self.ranks = axes.ranks(devices)
        self._deadline = deadline
        self._remotes: dict[int, type[Remote]] = {}
        self._starting = threading.Lock()
        self._main, self._beside = _Lane(), _Lane(BESIDE)
        self._broken, self._lost_one, self._closed = "", False, False
        self._processes: dict[int, Process] = {}
        self._seats = pool.seats(devices, axes, timeout=deadline, patient=patient)
        fixed = {
            "runtime_env": {"env_vars": worker_environment(pool.device_type)},
            "max_restarts": 0,
            "max_task_retries": 0,
            "enable_task_events": False,
        }
        whole_class: dict[str, Any] = {
            "enable_tensor_transport": plane.transport.counted_in_ranks,
            "concurrency_groups": {BESIDE: 1},
        }
        actor = ray.remote(**whole_class)(RankActor)
        self._actors = [
            actor.options(**fixed, **options).remote(slab, info, plane, logger.getEffectiveLevel())
            for info, options in zip(self.ranks, self._seats.options, strict=True)
        ]
        try:
            self._join(pool.device_type)
        except BaseException:
            self._kill()
            raise

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        self._remotes[key] = remote
        calls = {info.rank: call for info in self.ranks}
        self._send(f"{remote.__name__}.__init__", "build", (key, remote), _packed(calls)).result()

    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        if self._closed:
            raise closed(self.slab, method)
        remote = self._remotes[key]
        lane = self._beside if remote.beside else self._main
        return self._send(f"{remote.__name__}.{method}", "call", (key, method), _packed(calls), lane=lane)

    def close(self, *, at_once: bool = False) -> None:
        self._closed = True
        try:
            if not at_once and not self._broken:
                self._of_all("closing its workers", "retire").result()
                if self._beside.unsettled:
                    self.settle(self._beside.unsettled[-1])
                self._of_all("closing its workers", "close").result()
        finally:
            self._kill()

    def settle(self, last: _Started) -> None:
        """Wait for `last`, and before it for all that was started before it in its lane."""
        with last.lane.settling:
            while not last.settled:
                call = last.lane.unsettled[0]
                if self._broken:
                    kind = WorkerLostError if self._lost_one else RuntimeError
                    call.error = kind(f"slab {self.slab} cannot run {call.place}: {self._broken}")
                else:
                    self._wait(call)
                last.lane.unsettled.popleft()

    def arrived(self, last: _Started) -> bool:
        """Whether `settle` would not wait."""
        if not last.lane.settling.acquire(blocking=False):
            return last.settled  # else it would wait for the thread that waits already
        try:
            if last.settled or self._broken:
                return True
            before = itertools.takewhile(lambda call: call is not last, last.lane.unsettled)
            refs = [ref for call in (*before, last) for ref in call.refs]
            return not refs or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)
        finally:
            last.lane.settling.release()

    def _join(self, device_type: str) -> None:
        self._processes = self._of_all("starting its ranks", "process").result()
        if len(self.ranks) > 1:
            meet = self._send("starting its ranks", "rendezvous", (self._seats.one_node,), {0: ()}).result()[0]
            self._of_all("joining its ranks", "join", meet, device_type, self._deadline).result()

    def _of_all(self, place: str, task: str, *arguments: Any) -> _Started:
        return self._send(place, task, arguments, {info.rank: () for info in self.ranks})

    def _send(
        self,
        place: str,
        task: str,
        fixed: Sequence[Any],
        values: Mapping[int, Sequence[Any]],
        *,
        lane: _Lane | None = None,
    ) -> _Started:
        """`task(*fixed, *values of the rank)` to each rank of `values`; `place` is its name in messages."""
        lane = lane or self._main
        with self._starting:  # one order for all ranks, whatever thread of the driver starts a call
            refs = {
                getattr(self._actors[rank], task).options(concurrency_group=lane.group).remote(*fixed, *own): rank
                for rank, own in values.items()
                if not self._broken
            }
            call = _Started(self, lane, place, refs)
            lane.unsettled.append(call)
        return call

    def _wait(self, call: _Started) -> None:
        """Wait for one call, until its deadline or a little longer than the first failure; note how it ended."""
        values: dict[int, Any] = {}
        failures: dict[int, Failure | RayError] = {}
        until, left = max(call.started, call.lane.idle_since) + self._deadline, math.inf
        while call.refs and left > 0:
            left = max(0.0, until - time.monotonic())  # even where the driver comes late, it looks once
            done, _ = ray.wait(list(call.refs), num_returns=len(call.refs), timeout=min(_POLL, left))
            for ref in done:
                rank = call.refs.pop(ref)
                outcome = _outcome(ref)
                if isinstance(outcome, RayError):
                    failures[rank] = outcome
                    continue
                _tell(self.slab, rank, outcome.said)
                if outcome.failure is None:
                    values[rank] = outcome.value
                else:
                    failures[rank] = outcome.failure
            if done and failures:
                deserted = all(isinstance(one, Failure) and one.deserted for one in failures.values())
                until = min(until, time.monotonic() + (_SEARCH if deserted else _AFTERMATH))
        call.lane.idle_since = time.monotonic()
        stuck = sorted(call.refs.values())
        if not failures and not stuck:
            call.values = dict(sorted(values.items()))
            return
        call.error = self._first_cause(call, failures) if failures else self._too_late(call, stuck)
        self._lost_one = any(isinstance(f, RayError) and not isinstance(f, RayTaskError) for f in failures.values())
        if stuck or self._lost_one:
            self._broken = f"{call.place} has broken it ({type(call.error).__name__}: {call.error})"

    def _first_cause(self, call: _Started, failures: Mapping[int, Failure | RayError]) -> BaseException:
        """A rank that died before any that failed, since the others fail for want of it; else the earliest failure."""
        for rank, failure in sorted(failures.items()):
            if isinstance(failure, RayError):
                return self._lost(call, rank, failure)
        raised = {rank: failure for rank, failure in failures.items() if isinstance(failure, Failure)}
        first = min(raised, key=lambda rank: (raised[rank].deserted, raised[rank].at, rank))
        error = raised[first].error
        error.add_note(f"on rank {first} of slab {self.slab}:\n{raised[first].traceback}")
        return error

    def _lost(self, call: _Started, rank: int, error: RayError) -> BaseException:
        if isinstance(error, RayTaskError):  # not raised by the rank's work: its arguments or its result cannot be sent
            error.add_note(f"in the arguments or the result of {call.place} on rank {rank} of slab {self.slab}")
            return error
        process = self._processes[rank] if self._processes else None
        where = f" (process {process.pid} on {process.address})" if process else ""
        cause = cause_of_death(process, error)
        lost = WorkerLostError(f"slab {self.slab} lost rank {rank}{where} in {call.place}: {cause}")
        lost.__cause__ = error
        return lost

    def _too_late(self, call: _Started, stuck: Sequence[int]) -> TimeoutError:
        for rank in stuck[:_SHOWN]:
            logger.error("rank %d of slab %s hangs in %s:\n%s", rank, self.slab, call.place, self._stacks(rank))
        return TimeoutError(
            f"{call.place} took longer than placement.deadline={self._deadline:g} s on ranks {_listed(stuck)} of slab "
            f"{self.slab}, and was given up; where they hang is in the log"
        )

    def _stacks(self, rank: int) -> str:
        if rank not in self._processes:
            return "(its process has not said where it runs)"
        try:
            return stacks(self._processes[rank])
        except (OSError, RayError) as error:  # it ended in the meantime, or its node does not answer either
            return f"(it does not say where: {error})"

    def _kill(self) -> None:
        """End the ranks, and wait until those of this node are gone: nothing of them may outlive the slab."""
        self._broken = self._broken or "it was closed before that was done"
        for actor in self._actors:
            ray.kill(cast(Any, actor))  # a proxy, which Ray's own annotation does not know
        self._seats.leave()
        until = time.monotonic() + _KILLED
        while time.monotonic() < until and not all(map(is_gone, self._processes.values())):
            time.sleep(0.02)
        left = [one.pid for one in self._processes.values() if not is_gone(one)]
        if left:
            logger.warning("processes %s of slab %s were killed %g s ago and are still there", left, self.slab, _KILLED)


class _Started(Pending[dict[int, Any]]):
    """A call that was sent to its ranks."""

    def __init__(self, launcher: RayLauncher, lane: _Lane, place: str, refs: dict[Any, int]) -> None:
        self.lane, self.place, self.refs = lane, place, refs
        self.started = time.monotonic()
        self.values: dict[int, Any] | None = None
        self.error: BaseException | None = None
        self._launcher = launcher

    def result(self) -> dict[int, Any]:
        self._launcher.settle(self)
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return self.values

    def done(self) -> bool:
        return self._launcher.arrived(self)

    @property
    def settled(self) -> bool:
        """Whether it was waited for."""
        return self.error is not None or self.values is not None


def _outcome(ref: Any) -> Outcome | RayError:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def _packed(calls: Mapping[int, Call]) -> dict[int, list[Any]]:
    """What is sent to each rank; a value that several of them get is put into the object store once."""
    shaped = {rank: Shape.of(call) for rank, call in calls.items()}
    times = collections.Counter(id(value) for _, values in shaped.values() for value in values)
    put: dict[int, Any] = {}

    def sent(value: Any) -> Any:
        if times[id(value)] < 2 or isinstance(value, _LIGHT):
            return value
        if id(value) not in put:
            put[id(value)] = ray.put(value)
        return put[id(value)]

    return {rank: [shape, *map(sent, values)] for rank, (shape, values) in shaped.items()}


def _tell(slab: str, rank: int, said: Sequence[Said]) -> None:
    """What a worker logged is logged here, what it printed is printed, each with its rank in front."""
    for one in said:
        line = f"[{slab} {rank}] {one.text.rstrip()}"
        if one.level:
            logging.getLogger(one.logger).log(one.level, "%s", line)
        else:
            # On a terminal the progress line stands there unfinished: it makes room, and comes back at its next turn.
            sys.stderr.write(f"\r\x1b[K{line}\n" if sys.stderr.isatty() else f"{line}\n")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    return shown if len(ranks) <= _RANKS_NAMED else f"{shown}, ... ({len(ranks)} of them)"
