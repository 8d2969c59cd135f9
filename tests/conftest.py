"""What every test shares: one thread, and hypothesis without a clock and without chance."""

from __future__ import annotations

import os

# For the processes that tests start: bits of matrix products depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.ranks import RankPool, rank_pool
from tests.ray_cluster import ray_cluster

torch.set_num_threads(1)

hypothesis.settings.register_profile("unirl", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("unirl")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(2, function, *args)`: what `function(rank_info, *args)` returns on each of two ranks."""
    with rank_pool() as pool:
        yield pool


@pytest.fixture(scope="session")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is connected to the Ray cluster of the session, which `Placement(launcher="ray")` then joins."""
    with ray_cluster(_session_folder(tmp_path_factory)):
        yield


def _session_folder(factory: pytest.TempPathFactory) -> Path:
    """One for all processes of pytest-xdist, which have temporary folders of their own in it."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
