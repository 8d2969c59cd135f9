"""Handle: the driver's side of a Remote."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from unirl.distributed.group.dispatch import Call, Dispatch, collect, plan
from unirl.distributed.group.launcher import Launcher, Located
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
        launcher, remote = self.handle.launcher, self.handle.remote.__name__
        with Located(f"in the arguments of {remote}.{self.method} for slab {launcher.slab}"):
            calls = plan(self.dispatch, Call(args, kwargs), launcher.ranks)
        results = launcher.call(self.handle.key, self.method, calls)
        with Located(f"in the results of {remote}.{self.method} from slab {launcher.slab}"):
            return collect(self.dispatch, results, launcher.ranks)


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
        hidden = {field.name for field in dataclasses.fields(self)} & set(self.remote.declared())
        if hidden:
            raise ValueError(
                f"{self.remote.__name__} declares {sorted(hidden)}, which name parts of a Handle: rename them"
            )

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
