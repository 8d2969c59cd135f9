"""The contract of a launcher, and what it runs inside each rank."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote
from unirl.distributed.group.replace import replace_each
from unirl.distributed.tensor.plane import DataPlane, fetched
from unirl.distributed.tensor.transport import Nowhere

Value = TypeVar("Value")


class WorkerLostError(RuntimeError):
    """The process of a rank, or its node, is gone: the message names slab, rank, remote, method and cause."""


class Pending(ABC, Generic[Value]):
    """A call under way."""

    @abstractmethod
    def result(self) -> Value:
        """Wait for it; the value, or the exception that ended it. Asked again, it answers the same."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would not wait."""


class Launcher(ABC):
    """Starts the ranks of one slab and runs calls in them.

    slab:  its name, for messages
    ranks: its ranks, in order
    """

    slab: str
    ranks: tuple[RankInfo, ...]

    @abstractmethod
    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        """An instance of `remote` under `key` in every rank; a `Sibling` in the arguments is the instance there."""

    @abstractmethod
    def start(self, key: int, method: str, calls: Mapping[int, Call]) -> Pending[dict[int, Any]]:
        """Run `method` in each rank of `calls`: results by rank, or the exception of the first rank that failed.

        Two lanes, the one of the workers that are `beside` and the one of the others, run at the same time. In a lane
        calls run one after another, in the order they were started, which is the same on all ranks.
        """

    def call(self, key: int, method: str, calls: Mapping[int, Call]) -> dict[int, Any]:
        """`start`, and wait."""
        return self.start(key, method, calls).result()

    @abstractmethod
    def close(self, *, at_once: bool = False) -> None:
        """Close the instances, the latest built first, and then the ranks.

        Calls under way are waited for; of those that wait for their turn a launcher may drop some.
        at_once: where ranks are processes of their own, kill them instead
        """


@dataclasses.dataclass(frozen=True)
class Sibling:
    """Stands for the instance under `key` in the rank that receives it."""

    key: int


@dataclasses.dataclass(frozen=True)
class Located:
    """Notes on whatever exception leaves the block where that was; its type and traceback stay as they are."""

    place: str

    def __enter__(self) -> str:
        return self.place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.place)


def closed(slab: str, method: str) -> ValueError:
    """What a call of a slab raises after its end."""
    return ValueError(f"slab {slab} is closed: its workers cannot be called any more ({method})")


class RankHost:
    """The instances of one rank, whatever launcher runs it.

    plane: keeps the heavy fields of results in this rank; None where the driver is this process
    """

    def __init__(self, slab: str, rank_info: RankInfo, plane: DataPlane | None = None) -> None:
        self._slab = slab
        self._rank_info = rank_info
        # The results of a rank that does not speak are dropped: they are not kept to begin with.
        self._plane = plane if plane is None or rank_info.speaks else DataPlane(Nowhere())
        self._instances: dict[int, Remote] = {}
        self._closing = contextlib.ExitStack()

    def build(self, key: int, remote: type[Remote], call: Call) -> None:
        """`remote` with the arguments of `call`, its siblings looked up here."""
        siblings = self._instances
        args = replace_each(call.args, Sibling, lambda sibling: siblings[sibling.key])
        kwargs = replace_each(call.kwargs, Sibling, lambda sibling: siblings[sibling.key])
        with self._located(remote, "__init__"):
            instance = remote.on_rank(self._rank_info, *args, **kwargs)
        self._instances[key] = instance
        self._closing.callback(self._close_one, instance)

    def call(self, key: int, method: str, call: Call) -> Any:
        """The result of one method here."""
        if key not in self._instances:
            raise closed(self._slab, method)
        instance = self._instances[key]
        with self._located(type(instance), method) as place:
            if self._plane is None:
                return getattr(instance, method)(*call.args, **call.kwargs)
            (args, kwargs), known = fetched((call.args, call.kwargs), type(instance).reads(method))
            result = getattr(instance, method)(*args, **kwargs)
            return self._plane.parked(result, place, known)

    def retire(self) -> None:
        """Refuse every further call."""
        self._instances.clear()

    def close(self) -> None:
        """Close every instance, the latest first, even when one of them fails; the failure is raised at the end."""
        self.retire()
        self._closing.close()

    def _close_one(self, instance: Remote) -> None:
        with self._located(type(instance), "close"):
            instance.close()

    def _located(self, remote: type[Remote], method: str) -> Located:
        return Located(f"in {remote.__name__}.{method} on rank {self._rank_info.rank} of slab {self._slab}")
