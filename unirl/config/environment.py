"""Every environment variable that UniRL reads or sets.

| variable             | read or set | meaning |
|----------------------|-------------|---------|
| CUDA_VISIBLE_DEVICES | read        | empty or -1 hides all devices: the machine counts as one without CUDA |
| OMP_NUM_THREADS      | set to 1    | one thread per worker on a CPU machine; more of them would only wait |
| OMP_WAIT_POLICY      | set PASSIVE | idle threads sleep and leave the core to the other workers |
| GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME | set to lo | ranks that share a node listen on loopback alone |
| RAY_ADDRESS          | read        | a Ray cluster to join, as `ray job submit` sets it; unset, the run starts one |
| RAY_AUTH_TOKEN       | read        | who may use the cluster that the run starts; unset, it is a random one |
| named by a recipe    | read        | a secret, such as `Judge.token_variable`: only its name is ever written down |
| XDG_CACHE_HOME       | read        | where caches lie; unset or empty means `~/.cache` |

What the user has set stays as it is. Recipes read variables of their own by `${oc.env:NAME}`, and `config.yaml` shows
what they read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CPU_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))  # NVIDIA, the same under WSL, AMD


def set_environment() -> None:
    """To be called before torch loads: OpenMP reads its variables once, with the library."""
    if not has_accelerator():
        for name, value in _CPU_THREADS.items():
            os.environ.setdefault(name, value)


def worker_environment(device_type: str) -> dict[str, str]:
    """What a worker process is started with, beside what it inherits: the variables that must be set before torch."""
    return {} if device_type == "cuda" else {name: os.environ.get(name, value) for name, value in _CPU_THREADS.items()}


def keep_to_loopback() -> None:
    """To be called before torch.distributed starts, where all ranks run on this node."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def ray_address() -> str | None:
    """The Ray cluster that the environment names."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_token() -> str | None:
    """What authenticates processes to a Ray cluster."""
    return os.environ.get("RAY_AUTH_TOKEN") or None


def secret(name: str) -> str:
    """The token in a variable that a recipe names; ValueError, which does not show it, where there is none."""
    if not os.environ.get(name):
        raise ValueError(f"environment variable {name} is not set: put the token there")
    value = os.environ[name]
    if not value.isascii() or any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError(f"environment variable {name} holds blanks or characters that no token has")
    return value


def has_accelerator() -> bool:
    """Whether a CUDA (or ROCm) device is visible, told without loading torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] in ("", "-1"):
        return False
    return any(driver.exists() for driver in _DRIVERS)


def cache_folder() -> Path:
    """What UniRL can make again, such as checkpoints that it has unpacked; it need not be there."""
    named = "XDG_CACHE_HOME" in os.environ and os.environ["XDG_CACHE_HOME"]
    return (Path(named) if named else Path.home() / ".cache") / "unirl"
