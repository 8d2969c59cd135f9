"""The devices of a Ray cluster, and which ranks get which."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue] - compiled, without stubs
from ray.exceptions import RaySystemError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unirl.config.environment import ray_address, ray_token
from unirl.distributed.group.axes import Axes
from unirl.distributed.group.cluster_folder import cluster_folder

_OWN_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns about a change of its own to come
    "RAY_prestart_worker_first_driver": "0",    # ranks start in environments of their own, which no such worker has
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",                # ranks are what the machine is there for
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
}  # fmt: skip
_GIB = 2**30
_MOST_STORE, _LEAST_STORE = 32 * _GIB, _GIB // 8


@dataclasses.dataclass(frozen=True)
class Seats:
    """Devices held for one slab.

    options:  what each rank's actor is started with
    one_node: they are all on one node
    """

    group: PlacementGroup
    options: tuple[dict[str, Any], ...]
    one_node: bool

    def leave(self) -> None:
        """Give the devices back; whatever still runs on them is killed."""
        remove_placement_group(self.group)


class DevicePool:
    """A Ray cluster: joined, or started here and then stopped when the pool is closed. Each device goes to one slab.

    devices: how many may be needed at once, for a cluster that is started here; None: as many as the machine has
    """

    def __init__(self, address: str | None, device: str | None, devices: int | None = None) -> None:
        with contextlib.ExitStack() as closing:
            _connect(closing, address or ray_address(), device, devices)
            gpus = sum(self._per_node("GPU"))
            if device == "cuda" and not gpus:
                raise ValueError("placement.device is cuda, but the Ray cluster has no GPU; use device=cpu or null")
            self._closing = closing.pop_all()
        self.device_type = device or ("cuda" if gpus else "cpu")

    @property
    def _resource(self) -> str:
        return "GPU" if self.device_type == "cuda" else "CPU"

    def capacity(self, axes: Axes) -> int:
        """Devices of the whole cluster that can be used with these axes."""
        count = sum(devices // axes.on_node * axes.on_node for devices in self._per_node(self._resource))
        return count // axes.product * axes.product

    def seats(self, count: int, axes: Axes, *, timeout: float, patient: bool = False) -> Seats:
        """That many devices, in the order of ranks: those of one node adjacent, the driver's first, each tp x sp
        within one.

        timeout: seconds to wait for devices that somebody else holds
        patient: wait for devices that the cluster has not, too, as for those of a node that comes back
        """
        if count > self.capacity(axes) and not patient:
            have = self._per_node(self._resource)
            raise ValueError(
                f"placement.devices={count}: the Ray cluster has {sum(have)} {self._resource}s on {len(have)} nodes "
                f"({', '.join(map(str, have))}), {self.capacity(axes)} of them usable in groups of tp x sp = "
                f"{axes.on_node}; ask for fewer devices, or add nodes"
            )
        group = placement_group([{self._resource: axes.on_node}] * (count // axes.on_node), strategy="PACK")
        ready = False
        try:
            ready = group.wait(timeout)
        finally:
            if not ready:
                remove_placement_group(group)
        if not ready:
            free = {"GPU": 0.0, "CPU": 0.0} | ray.available_resources()
            raise ValueError(
                f"placement.devices={count}: they did not come free in {timeout:g} s; free are "
                f"{free[self._resource]:g} {self._resource}s of the Ray cluster"
            )
        nodes = placement_group_table(group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        order = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
        return Seats(
            group, tuple(self._on(group, bundle) for bundle in order for _ in range(axes.on_node)),
            one_node=len(set(nodes.values())) == 1,
        )  # fmt: skip

    def close(self) -> None:
        """Stop the cluster if it was started here; leave it if it was joined here."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _per_node(self, resource: str) -> list[int]:
        totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [int(total[resource]) for total in totals if resource in total]

    def _on(self, group: PlacementGroup, bundle: int) -> dict[str, Any]:
        gpu = self._resource == "GPU"
        return {
            "num_cpus": 0 if gpu else 1,
            "num_gpus": 1 if gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        }


def _connect(closing: contextlib.ExitStack, address: str | None, device: str | None, devices: int | None) -> None:
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise ValueError(f"placement.address is {address}, but this process is connected to Ray at {connected}")
        return
    if address is None:
        _start(closing, device, devices)
        return
    try:
        with _set({"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}), _same_signals():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RaySystemError) as error:
        raise ValueError(
            f"placement.address={address}: no Ray cluster can be joined there ({error}); start one with "
            "`ray start --head`, or leave address unset"
        ) from error
    closing.callback(ray.shutdown)


def _start(closing: contextlib.ExitStack, device: str | None, devices: int | None) -> None:
    """A cluster of this machine alone, which listens on loopback and keeps its files in a folder that goes with it."""
    folder = closing.enter_context(cluster_folder())
    cpus = max(os.cpu_count() or 1, devices or 1)
    # A token of its own, where Ray would write one to the user's home; it caches the one that it read last.
    token = {"RAY_AUTH_TOKEN": ray_token() or secrets.token_hex(32)}
    with _set(_OWN_CLUSTER | token), on_loopback(), _same_signals():
        AuthenticationTokenLoader.instance().reset_cache()
        closing.callback(ray.shutdown)
        ray.init(
            "local",
            num_cpus=cpus,
            num_gpus=0 if device == "cpu" else None,
            object_store_memory=_store_bytes(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Ray listens on all interfaces unless it takes the machine for a laptop; there is no other switch for it."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Ray makes SIGTERM end the process at once, where the run may have said what it does then."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started in the block; Ray sets more of them, which go, too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _store_bytes() -> int:
    """The object store: 30 % of the memory, as Ray takes, but within what shared memory has and below a bound."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 10
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free * 8 // 10 if shared.is_dir() else memory
    return max(_LEAST_STORE, min(memory, free, _MOST_STORE))
