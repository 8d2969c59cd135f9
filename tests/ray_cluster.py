"""One Ray cluster for all the processes of a test session: a cluster takes seconds to start."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CORES = 16  # said to be there; ranks of tests only take turns


@contextmanager
def ray_cluster(folder: Path) -> Iterator[None]:
    """This process, connected to the cluster of the session: a Placement without an address joins it.

    folder: shared by all processes of the session; the one that started the cluster waits until the others have left
    """
    starting, using = folder / "ray.start", folder / "ray.use"
    with starting.open("w") as start, using.open("w") as use, ExitStack() as closing:
        fcntl.flock(start, fcntl.LOCK_EX)
        place = folder / "ray.address"
        if not place.exists():
            token = secrets.token_hex(32)
            place.write_text(f"{closing.enter_context(_server(token))} {token}")
            closing.callback(place.unlink)
            closing.callback(fcntl.flock, use, fcntl.LOCK_EX)
            closing.callback(fcntl.flock, start, fcntl.LOCK_EX)  # first of all: nobody joins what is about to end
        fcntl.flock(use, fcntl.LOCK_SH)
        fcntl.flock(start, fcntl.LOCK_UN)
        address, token = place.read_text().split()
        # For the whole session: Ray reads its mode when it is first imported, and programs that tests start inherit it.
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
        import ray

        from unirl.distributed.group.device_pool import on_loopback

        with on_loopback():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
            fcntl.flock(use, fcntl.LOCK_UN)


def start_transfer_queue() -> None:
    """One in the cluster of this process, which lasts as long as the cluster, whoever has started it."""
    import ray

    class Host:
        def start(self) -> None:
            import transfer_queue  # pyright: ignore[reportMissingImports]
            from omegaconf import OmegaConf

            transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))

    shared = ray.remote(Host).options(
        name="host", namespace="transfer_queue", lifetime="detached", get_if_exists=True, num_cpus=0
    )
    host = shared.remote()
    ray.get(host.start.remote(), timeout=120)


@contextmanager
def _server(token: str) -> Iterator[str]:
    """Address of a cluster in a process that ends with this one, since it then reads the end of its input."""
    environment = os.environ | {"RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-m", "tests.ray_cluster"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


def _serve() -> None:
    import ray

    from unirl.distributed.group.device_pool import DevicePool

    with DevicePool(None, "cpu", CORES):
        sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
