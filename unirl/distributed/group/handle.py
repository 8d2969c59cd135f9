"""Handle: the driver's side of a Remote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from unirl.distributed.group.dispatch import Call, Dispatch, collect, plan
from unirl.distributed.group.launcher import Launcher, Located, Pending
from unirl.distributed.group.remote import Remote

Worker = TypeVar("Worker", bound=Remote)


@dataclasses.dataclass(frozen=True)
class RemoteCall:
    """One declared method of one worker, ready to be called."""

    handle: Handle[Any]
    method: str
    dispatch: Dispatch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on the ranks its dispatch names, wait, and return one result.

        An exception keeps its type and traceback and gets a note that names remote, method, rank and slab.
        """
        launcher = self.handle.launcher
        return self.collected(launcher.call(self.handle.key, self.method, self._planned(args, kwargs)))

    def start(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """The same without waiting: `result()` of what it returns waits. Wrong arguments are refused at once."""
        launcher = self.handle.launcher
        return Started(self, launcher.start(self.handle.key, self.method, self._planned(args, kwargs)))

    def collected(self, results: Mapping[int, Any]) -> Any:
        """One result from those of the ranks."""
        launcher = self.handle.launcher
        with Located(f"in the results of {self._name} from slab {launcher.slab}"):
            return collect(self.dispatch, results, launcher.ranks)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Call]:
        launcher = self.handle.launcher
        with Located(f"in the arguments of {self._name} for slab {launcher.slab}"):
            return plan(self.dispatch, Call(args, kwargs), launcher.ranks)

    @property
    def _name(self) -> str:
        return f"{self.handle.remote.__name__}.{self.method}"


@dataclasses.dataclass(frozen=True)
class Started(Pending[Any]):
    """A call of a handle under way."""

    call: RemoteCall
    pending: Pending[dict[int, Any]]

    def result(self) -> Any:
        return self.call.collected(self.pending.result())

    def done(self) -> bool:
        return self.pending.done()


@dataclasses.dataclass(frozen=True, eq=False)
class Handle(Generic[Worker]):
    """Calls the declared methods of a worker: `handle.method(x)`. Made by `Slab.spawn`.

    launcher: runs the calls
    remote:   the class of the worker
    key:      names its instances in the ranks
    """

    launcher: Launcher
    remote: type[Worker]
    key: int

    def __post_init__(self) -> None:
        hidden = {"dp", *(field.name for field in dataclasses.fields(self))} & set(self.remote.declared())
        if hidden:
            raise ValueError(
                f"{self.remote.__name__} declares {sorted(hidden)}, which name parts of a Handle: rename them"
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks of the slab."""
        return self.launcher.ranks[0].dp

    def __getattr__(self, name: str) -> RemoteCall:
        # Copying and pickling ask for dunder names before there are fields; those are never remote methods.
        if name.startswith("__"):
            raise AttributeError(name)
        declared = self.remote.declared()
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise AttributeError(
                f"{self.remote.__name__}.{name} is not a remote method; declared are: {known}",
                name=name,
                obj=self,
            )
        return RemoteCall(self, name, declared[name])
