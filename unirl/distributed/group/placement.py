"""Placement: on which devices the workers of a run live; Slab: the ranks that share one set of devices."""

from __future__ import annotations

import dataclasses
import itertools
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import Launcher, Sibling
from unirl.distributed.group.launcher_local import LocalLauncher
from unirl.distributed.group.remote import Remote
from unirl.distributed.group.replace import replace_each

Worker = TypeVar("Worker", bound=Remote)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run's workers live.

    launcher: `local` runs the one rank in this process
    device:   `cuda` or `cpu`; None is what the machine has, CUDA before CPU
    """

    launcher: Literal["local"] = "local"
    device: str | None = None

    def __post_init__(self) -> None:
        if self.launcher != "local":
            raise ValueError(f"placement.launcher must be local, got {self.launcher!r}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(
                f"placement.device must be cpu, cuda or null, got {self.device!r}; "
                "CUDA_VISIBLE_DEVICES picks one of several GPUs"
            )

    def device_type(self) -> str:
        """`cuda` or `cpu`. Raises ValueError where CUDA was asked for and there is none."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("placement.device is cuda, but torch sees no CUDA device; use device=cpu or device=null")
        return self.device or ("cuda" if available else "cpu")

    def slab(self, name: str = "main") -> Slab:
        """The ranks, started and still empty."""
        return Slab(LocalLauncher(name))


class Slab:
    """Ranks on one set of devices. Workers spawned into it are siblings: in every rank, one instance of each.

    A context manager: leaving the block closes it.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._keys = itertools.count()
        self._closed = False

    @property
    def name(self) -> str:
        """For messages."""
        return self._launcher.slab

    def spawn(self, remote: type[Worker], *args: Any, **kwargs: Any) -> Handle[Worker]:
        """An instance of `remote(*args, **kwargs)` in every rank; a Handle in the arguments is the sibling there."""
        if self._closed:
            raise ValueError(f"slab {self.name} is closed: {remote.__name__} cannot be spawned in it")
        owner = f"{remote.__name__} in slab {self.name}"
        call = Call(
            replace_each(args, Handle, lambda handle: self._sibling(handle, owner)),
            replace_each(kwargs, Handle, lambda handle: self._sibling(handle, owner)),
        )
        handle = Handle(self._launcher, remote, next(self._keys))
        self._launcher.build(handle.key, remote, call)
        return handle

    def close(self) -> None:
        """Close the workers, the latest spawned first, and the ranks. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._launcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sibling(self, handle: Handle[Any], owner: str) -> Sibling:
        if handle.launcher is not self._launcher:
            raise ValueError(
                f"{owner} was given a handle of {handle.remote.__name__} in slab {handle.launcher.slab}: only workers "
                "of one slab share their ranks; spawn both in one slab, or let the driver pass values between them"
            )
        return Sibling(handle.key)
