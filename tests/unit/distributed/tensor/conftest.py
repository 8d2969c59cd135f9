"""One Ray cluster for all tests of this folder, and two slabs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unirl.distributed.group.device_pool import DevicePool
from unirl.distributed.group.placement import Placement, Slab


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Three CPU workers."""
    with DevicePool(None, "cpu", 3):
        yield


@pytest.fixture(scope="session")
def pair(cluster: None) -> Iterator[Slab]:
    """Two ranks."""
    with Placement(launcher="ray", device="cpu", devices=2, deadline=120).slab("pair") as slab:
        yield slab
