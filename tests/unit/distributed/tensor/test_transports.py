"""The transports of Ray: rows that two ranks keep, the driver holds, and the last reference frees."""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
import re
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.hosted import HostedLauncher
from tests.unit.distributed.tensor.kept import Mortal, Studio, pictures, request
from tests.unit.types.same import assert_same_sample
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement, Slab
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.distributed.tensor.plane import resolved
from unirl.types.metric import values
from unirl.types.sample import Sample

pytestmark = pytest.mark.ray


class Judge(Studio):
    """Looks at pictures while others are drawn."""

    beside: ClassVar[bool] = True


@pytest.fixture(scope="module")
def studio(pair: Slab) -> Handle[Studio]:
    return pair.spawn(Studio)


def in_one_process(prompts: int) -> tuple[Sample, Sample]:
    """What the driver's own process draws, and the same twice as bright."""
    local = Slab(HostedLauncher("main", 1)).spawn(Studio)
    drawn = local.draw(request(prompts))
    return drawn, local.brighten(drawn)


@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_two_processes_give_what_one_gives(studio: Handle[Studio], prompts: int) -> None:
    """A prompt for one of the ranks alone, as many as ranks, and an uneven number."""
    expected, brighter = in_one_process(prompts)
    drawn = studio.draw(request(prompts))
    assert isinstance(drawn.frontier.segment, FieldRef)
    assert_same_sample(resolved(drawn), expected)
    assert_same_sample(resolved(studio.same(studio.brighten(drawn))), brighter)


@pytest.mark.parametrize(
    ("method", "times"), [("light", 1), ("together", 1), ("everyone", 2), ("first", 1)], ids=lambda value: str(value)
)
def test_every_dispatch_brings_its_rows(studio: Handle[Studio], method: str, times: int) -> None:
    """Three prompts of two pictures, of which one is white (48 numbers); a broadcast counts them on both ranks."""
    drawn = studio.draw(request(3))
    assert values(getattr(studio, method)(drawn)) == {"light": 3 * 48 * times}


def test_rows_of_both_ranks_in_any_order_reach_both(studio: Handle[Studio]) -> None:
    drawn = studio.draw(request(3))
    order = [5, 0, 3, 3, 1]
    part = drawn.frontier
    assert isinstance(part.media, FieldRef)
    shuffled = resolved(part.media.select(order))
    assert shuffled.images[:, 0, 0, 0].tolist() == [1, 0, 1, 1, 1]


def test_what_a_method_writes_into_is_its_own_copy(studio: Handle[Studio]) -> None:
    drawn = studio.draw(request(2))
    for _ in range(2):
        assert values(studio.paint_over(drawn)) == {"light": 2 * 48}
    mine = resolved(drawn)
    pictures(mine).zero_()
    assert float(pictures(resolved(drawn)).sum()) == 2 * 48


def test_both_lanes_of_a_rank_keep_and_fetch_at_once(pair: Slab) -> None:
    """Each rank has the rows of the other brought in both lanes, while rows of earlier turns are freed."""
    studio, judge = pair.spawn(Studio, 64), pair.spawn(Judge)
    drawn, light = studio.draw(request(5)), 2 * 5 * 3 * 64**2
    pending = []
    for turn in range(1, 9):
        drawn = studio.brighten(drawn)
        pending += [judge.everyone.start(drawn), judge.everyone.start(studio.draw(request(5)))]
        assert values(studio.everyone(drawn)) == {"light": light * 2**turn}
    lights = [values(one.result())["light"] for one in pending]
    assert lights == [light * 2**power for turn in range(1, 9) for power in (turn, 0)]


def test_what_the_driver_holds_does_not_grow_with_what_ranks_keep(pair: Slab) -> None:
    """Pictures of 16 and of 256 pixels: 3 kB and 786 kB a row, and as much again in latents."""
    held = [held_bytes(pair.spawn(Studio, size).draw(request(4))) for size in (16, 256)]
    assert abs(held[1] - held[0]) < 100
    assert held[1] < 10_000


def test_nothing_of_twenty_steps_stays_in_the_store(studio: Handle[Studio]) -> None:
    before = settled(studio)
    shared = in_shared_memory()
    for _ in range(20):
        drawn = studio.draw(request(3))
        assert stored(studio) != before
        brighter = studio.brighten(drawn)
        assert values(studio.light(brighter)) == {"light": 2 * 3 * 48}
    del drawn, brighter
    assert settled(studio) == before
    assert in_shared_memory() == shared


def test_rows_of_a_rank_that_died_are_lost_by_name(studio: Handle[Studio], placement: Placement) -> None:
    """For the driver and for a rank of another slab; the rows of other ranks are not."""
    with dataclasses.replace(placement, devices=1).slab("alone") as alone:
        mortal = alone.spawn(Mortal, 128)
        drawn, whole = mortal.draw(request(2)), studio.draw(request(2))
        assert values(studio.light(drawn)) == {"light": 2 * 3 * 128**2}
        with pytest.raises(WorkerLostError, match="slab alone lost rank 0"):
            mortal.die(0)
    cause = (
        r"rows made in Mortal\.draw on rank 0 of slab alone are lost: (its process (has ended|does not answer)|Tran)"
    )
    with pytest.raises(WorkerLostError, match=cause):
        brought_until_lost(drawn)
    with pytest.raises(WorkerLostError, match=cause):
        studio.light(drawn)
    assert values(studio.light(whole)) == {"light": 2 * 48}


def brought_until_lost(sample: Sample) -> None:
    """The store may still have the rows of a dead process for a moment."""
    for _ in range(100):
        resolved(sample)
        time.sleep(0.1)


def in_shared_memory() -> set[str]:
    """What the transports have there by name; other programs of the machine come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("plasma", "ucx"))}


def stored(studio: Handle[Studio]) -> tuple[frozenset[str], float]:
    """Objects of this process and its ranks (others use the cluster too), and tensors that Ray keeps in the ranks."""
    import ray
    from ray._private.internal_api import memory_summary

    context = ray.get_runtime_context()
    own = rf"\b[0-9a-f]{{40}}{context.get_job_id()}[0-9a-f]{{8}}\b"  # the id of an object names the job that made it
    return frozenset(re.findall(own, memory_summary(context.gcs_address))), values(studio.kept())["kept"]


def settled(studio: Handle[Studio]) -> tuple[frozenset[str], float]:
    """The same after Ray has freed what nobody refers to, which takes it a moment."""
    gc.collect()
    seen = [stored(studio)]
    while len(seen) < 100 and seen[-10:] != [seen[-1]] * 10:
        time.sleep(0.1)
        seen.append(stored(studio))
    return seen[-1]


def held_bytes(value: object) -> int:
    """Pickled size without what Ray writes for its references."""
    import ray

    class Sizing(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return "reference" if isinstance(obj, ray.ObjectRef) else None

    file = io.BytesIO()
    Sizing(file).dump(value)
    return file.tell()
