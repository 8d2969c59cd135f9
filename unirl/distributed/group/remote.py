"""Remote: the base of every worker, and the declaration of what a driver may call on it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.rank_info import RankInfo

Method = TypeVar("Method", bound=Callable[..., Any])


class RemoteMethod:
    """A method that a driver may call. On an instance it is the plain method; on the class, this declaration."""

    def __init__(self, function: Callable[..., Any], dispatch: Dispatch, reads: tuple[str, ...] | None) -> None:
        functools.update_wrapper(cast(Callable[..., Any], self), function)
        self.function = function
        self.dispatch = dispatch
        self.reads = reads

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else types.MethodType(self.function, instance)


def remote(dispatch: Dispatch, *, reads: tuple[str, ...] | None = None) -> Callable[[Method], Method]:
    """Declare a method of a Remote, and how a call of it fans out. To a type checker it stays the method it is.

    reads: the heavy fields that it looks at, by name, where not all of them: the others do not travel to it
    """

    def declare(function: Method) -> Method:
        return cast(Method, RemoteMethod(function, dispatch, reads))

    return declare


class Remote:
    """One logical worker: an instance of the same class in every rank of a slab.

    rank_info: set before `__init__` runs, so a constructor may read it; made by hand, a Remote is rank 0 of 1
    beside:    a class that never talks to other ranks says True: its calls then run beside those of its siblings, in a
               thread of their own. It shares their process, and no sibling but such as are beside as well
    """

    rank_info: RankInfo = RankInfo(rank=0, world_size=1)
    beside: ClassVar[bool] = False

    @classmethod
    def on_rank(cls, rank_info: RankInfo, *args: Any, **kwargs: Any) -> Self:
        """`cls(*args, **kwargs)` as that rank: what a launcher calls."""
        instance = cls.__new__(cls)
        instance.rank_info = rank_info
        instance.__init__(*args, **kwargs)
        return instance

    @classmethod
    def declared(cls) -> dict[str, Dispatch]:
        """The methods a driver may call. A plain override of a declared method keeps its dispatch."""
        return {name: method.dispatch for name, method in cls._methods().items()}

    @classmethod
    def reads(cls, method: str) -> tuple[str, ...] | None:
        """The heavy fields that a method looks at; None stands for all. A plain override keeps the declaration."""
        declared = cls._methods()
        return declared[method].reads if method in declared else None

    @classmethod
    def _methods(cls) -> dict[str, RemoteMethod]:
        return {
            name: value
            for owner in reversed(cls.__mro__)
            for name, value in vars(owner).items()
            if isinstance(value, RemoteMethod)
        }

    def close(self) -> None:
        """Give back what this worker holds (files, processes); called once, the latest spawned worker first."""
