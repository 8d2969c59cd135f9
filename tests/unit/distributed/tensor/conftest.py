"""Slabs of two ranks on the Ray cluster of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray_cluster import start_transfer_queue
from unirl.distributed.group.placement import Placement, Slab

OPTIONAL = [pytest.param(name, marks=pytest.mark.slow) for name in ("direct", "transfer_queue")]


@pytest.fixture(scope="session", params=["object_store", *OPTIONAL])
def placement(ray: None, request: pytest.FixtureRequest) -> Placement:
    """With each of the transports of Ray."""
    if request.param == "transfer_queue":
        start_transfer_queue()
    return Placement(launcher="ray", device="cpu", devices=2, deadline=120, transport=request.param)


@pytest.fixture(scope="session")
def pair(placement: Placement) -> Iterator[Slab]:
    """Two ranks."""
    with placement.slab("pair") as slab:
        yield slab
