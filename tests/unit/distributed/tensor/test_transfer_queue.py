"""The transport through a TransferQueue that runs in the cluster: what is in the queue, and when it goes."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.ray_cluster import start_transfer_queue
from tests.unit.distributed.tensor.kept import Mortal, Studio, request
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.types.metric import values
from unirl.types.sample import Sample

pytestmark = pytest.mark.slow


@pytest.fixture
def placement(ray: None) -> Placement:
    """In a cluster with a TransferQueue."""
    start_transfer_queue()
    return Placement(launcher="ray", device="cpu", devices=2, deadline=120, transport="transfer_queue")


def partition_of(sample: Sample) -> str:
    """That of the slab which made it; other processes of the session use the queue, too."""
    from unirl.distributed.tensor.transfer_queue import TransferQueue

    media = sample.frontier.media
    assert isinstance(media, FieldRef)
    transport = media.parcels[0].transport
    assert isinstance(transport, TransferQueue)
    return transport.partition


def queued(partition: str) -> int:
    """Its keys in the queue."""
    import transfer_queue  # pyright: ignore[reportMissingImports]

    return sum(map(len, transfer_queue.kv_list(partition).values()))


def settles(partition: str, keys: int) -> bool:
    """Whether so many are left, once Ray has freed what nobody refers to, which takes it a moment."""
    until = time.monotonic() + 60
    while queued(partition) != keys and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    return queued(partition) == keys


def test_rows_are_in_the_queue_as_long_as_somebody_refers_to_them(placement: Placement) -> None:
    with placement.slab("queueing") as slab:
        studio = slab.spawn(Studio)
        for _ in range(5):
            drawn = studio.draw(request(3))
        own = partition_of(drawn)
        assert values(studio.light(drawn)) == {"light": 3 * 48}
        assert settles(own, 6)  # both ranks keep media, segment and conditions of the last drawing
        del drawn
        assert settles(own, 0)


def test_what_a_killed_rank_has_put_goes_with_its_slab(placement: Placement) -> None:
    with dataclasses.replace(placement, devices=1).slab("killed") as slab:
        mortal = slab.spawn(Mortal)
        drawn = mortal.draw(request(2))
        own = partition_of(drawn)
        with pytest.raises(WorkerLostError):
            mortal.die(0)
        assert queued(own) == 3
    assert queued(own) == 0


def test_a_call_that_the_queue_does_not_answer_ends() -> None:
    from unirl.distributed.tensor.transfer_queue import _within

    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"TransferQueue did not answer within 0\.1 s: is its controller alive"):
        _within(0.1, never.wait)
    never.set()


def test_a_cluster_without_a_queue_is_refused() -> None:
    program = (
        "from unirl.distributed.group.placement import Placement\n"
        "Placement(launcher='ray', device='cpu', devices=1, transport='transfer_queue').slab()"
    )
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "ValueError: placement.transport is transfer_queue, and none runs in this cluster" in ended.stderr
