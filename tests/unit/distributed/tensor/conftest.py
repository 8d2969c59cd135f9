"""Slabs of two ranks on the Ray cluster of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unirl.distributed.group.placement import Placement, Slab


@pytest.fixture(scope="session", params=["object_store", pytest.param("direct", marks=pytest.mark.slow)])
def placement(ray: None, request: pytest.FixtureRequest) -> Placement:
    """With each of the transports of Ray."""
    return Placement(launcher="ray", device="cpu", devices=2, deadline=120, transport=request.param)


@pytest.fixture(scope="session")
def pair(placement: Placement) -> Iterator[Slab]:
    """Two ranks."""
    with placement.slab("pair") as slab:
        yield slab
