"""Placement: on which devices the workers of a run live; Slab: the ranks that share one set of devices."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from unirl.distributed.group.axes import Axes
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import Launcher, Sibling
from unirl.distributed.group.launcher_local import LocalLauncher
from unirl.distributed.group.remote import Remote
from unirl.distributed.group.replace import replace_each
from unirl.distributed.tensor.plane import DataPlane
from unirl.distributed.tensor.transport import Transport

Worker = TypeVar("Worker", bound=Remote)

_NEEDED_BY_TRANSPORT = {  # the package, and the extra that installs it
    "object_store": ("ray", "ray"),
    "direct": ("nixl", "direct"),
    "transfer_queue": ("transfer_queue", "transfer-queue"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run's workers live.

    launcher: `local` runs the one rank in this process; `ray` runs each rank in a process of its own
    device:   `cuda` or `cpu`; None is what the machine, or the Ray cluster, has: CUDA before CPU

    With `ray` alone:
    devices:  ranks, one a device; None is all that the cluster has (its GPUs, or its CPU cores)
    tp, sp, ep, pp: tensor, sequence, expert and pipeline parallel ranks; the rest of `devices` is data parallel
    address:  `host:port` of a Ray cluster to join, `auto` for the one of this machine; None is the one that RAY_ADDRESS
              names, else one that is started for the run and stopped with it
    deadline: seconds that one call of a worker may take, loading weights included; then it counts as hung
    transport: what carries pictures, latents and conditions between ranks: Ray's object store; `direct` from memory to
              memory (NIXL), on GPUs without a way through the CPU; or the `transfer_queue` that runs in the cluster
    """

    launcher: Literal["local", "ray"] = "local"
    device: str | None = None
    devices: int | None = None
    tp: int = 1
    sp: int = 1
    ep: int = 1
    pp: int = 1
    address: str | None = None
    deadline: float = 3600.0
    transport: Literal["object_store", "direct", "transfer_queue"] = "object_store"

    def __post_init__(self) -> None:
        if self.launcher not in ("local", "ray"):
            raise ValueError(f"placement.launcher must be local or ray, got {self.launcher!r}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(
                f"placement.device must be cpu, cuda or null, got {self.device!r}; "
                "CUDA_VISIBLE_DEVICES picks one of several GPUs"
            )
        if self.launcher == "local":
            self._refuse_settings_of_ray()
        else:
            self._check_ray()

    @property
    def axes(self) -> Axes:
        """The parallel axes beside data parallel."""
        return Axes(tp=self.tp, sp=self.sp, ep=self.ep, pp=self.pp)

    def device_type(self) -> str:
        """`cuda` or `cpu` of this process. Raises ValueError where CUDA was asked for and there is none."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("placement.device is cuda, but torch sees no CUDA device; use device=cpu or device=null")
        return self.device or ("cuda" if available else "cpu")

    def slab(self, name: str = "main", *, in_place_of: Slab | None = None) -> Slab:
        """All ranks, started and still empty. Closing it ends what was started for them.

        in_place_of: a slab that lost a rank: it gets as many ranks, and waits for devices of a node to come back
        """
        if self.launcher == "local":
            return Slab(LocalLauncher(name), device_type=self.device_type())
        from unirl.distributed.group.device_pool import DevicePool
        from unirl.distributed.group.launcher_ray import RayLauncher

        with contextlib.ExitStack() as closing:
            pool = closing.enter_context(DevicePool(self.address, self.device, self.devices))
            transport = closing.enter_context(self._transport())
            axes = self.axes
            devices = pool.capacity(axes) if self.devices is None else self.devices
            devices = devices if in_place_of is None else in_place_of.size
            launcher = RayLauncher(
                name,
                pool,
                devices,
                axes=axes,
                deadline=self.deadline,
                plane=DataPlane(transport),
                patient=in_place_of is not None,
            )
            return Slab(launcher, device_type=pool.device_type, afterwards=closing.pop_all().close)

    def _transport(self) -> contextlib.AbstractContextManager[Transport]:
        """That of a slab, in the cluster that this process has joined."""
        if self.transport == "transfer_queue":
            from unirl.distributed.tensor.transfer_queue import joined

            return joined(self.deadline)
        from unirl.distributed.tensor.direct import Direct
        from unirl.distributed.tensor.object_store import ObjectStore

        return contextlib.nullcontext((Direct if self.transport == "direct" else ObjectStore)(self.deadline))

    def _refuse_settings_of_ray(self) -> None:
        for field in dataclasses.fields(self):
            value = self.__dict__[field.name]
            if field.name not in ("launcher", "device") and value != field.default:
                one = " (local is one device)" if field.name == "devices" else ""
                raise ValueError(f"placement.{field.name}={value} needs placement.launcher=ray{one}")

    def _check_ray(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("placement.launcher is ray, which is not installed: pip install unirl[ray]")
        for name in ("tp", "sp", "ep", "pp"):
            if self.__dict__[name] < 1:
                raise ValueError(f"placement.{name} must be at least 1, got {self.__dict__[name]}")
        if self.devices is not None:
            self.axes.ranks(self.devices)
        if self.transport not in _NEEDED_BY_TRANSPORT:
            raise ValueError(f"placement.transport must be one of {list(_NEEDED_BY_TRANSPORT)}, got {self.transport!r}")
        package, extra = _NEEDED_BY_TRANSPORT[self.transport]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"placement.transport is {self.transport}, which needs {package}: pip install unirl[{extra}]"
            )
        if not self.deadline > 0:
            raise ValueError(f"placement.deadline must be positive, got {self.deadline:g}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"placement.address={self.address}: Ray Client is not supported; start the run on a node of the "
                "cluster (`ray job submit`), with address=auto"
            )


class Slab:
    """Ranks on one set of devices. Workers spawned into it are siblings: in every rank, one instance of each.

    A context manager: leaving the block closes it.

    device_type: `cuda` or `cpu`
    afterwards:  called when it is closed
    """

    def __init__(
        self, launcher: Launcher, *, device_type: str = "cpu", afterwards: Callable[[], None] | None = None
    ) -> None:
        self.device_type = device_type
        self._launcher = launcher
        self._afterwards = afterwards
        self._keys = itertools.count()
        self._closed = False

    @property
    def name(self) -> str:
        """For messages."""
        return self._launcher.slab

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._launcher.ranks)

    def spawn(self, remote: type[Worker], *args: Any, **kwargs: Any) -> Handle[Worker]:
        """An instance of `remote(*args, **kwargs)` in every rank; a Handle in the arguments is the sibling there."""
        if self._closed:
            raise ValueError(f"slab {self.name} is closed: {remote.__name__} cannot be spawned in it")
        call = Call(
            replace_each(args, Handle, lambda handle: self._sibling(handle, remote)),
            replace_each(kwargs, Handle, lambda handle: self._sibling(handle, remote)),
        )
        handle = Handle(self._launcher, remote, next(self._keys))
        self._launcher.build(handle.key, remote, call)
        return handle

    def close(self, *, at_once: bool = False) -> None:
        """Close the workers, the latest spawned first, and the ranks. A second call does nothing.

        at_once: kill ranks that are processes of their own, whatever they are doing
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._launcher.close(at_once=at_once)
        finally:
            if self._afterwards is not None:
                self._afterwards()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=isinstance(error, KeyboardInterrupt))

    def _sibling(self, handle: Handle[Any], owner: type[Remote]) -> Sibling:
        place = f"{owner.__name__} in slab {self.name}"
        if handle.launcher is not self._launcher:
            raise ValueError(
                f"{place} was given a handle of {handle.remote.__name__} in slab {handle.launcher.slab}: only workers "
                "of one slab share their ranks; spawn both in one slab, or let the driver pass values between them"
            )
        if owner.beside and not handle.remote.beside:
            raise ValueError(
                f"{place} was given a handle of {handle.remote.__name__}, which is not `beside`: its calls may be "
                f"running while those of {owner.__name__} do; let the driver pass values between them"
            )
        return Sibling(handle.key)
