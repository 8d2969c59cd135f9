"""DataPlane: what ranks keep, what the driver holds, and what reaches a method."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosted import HostedLauncher
from tests.unit.distributed.tensor.kept import SAMPLING, Counting, Holder, Studio, pictures, request
from tests.unit.types.same import assert_same, assert_same_sample
from tests.unit.types.test_batch import everything
from tests.unit.types.test_segment import trajectory
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import RankHost
from unirl.distributed.group.placement import Placement, Slab
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.tensor.field_ref import FieldRef
from unirl.distributed.tensor.in_process import InProcess
from unirl.distributed.tensor.plane import DataPlane, resolved
from unirl.types.batch import Rows, nested
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sample import Part, Sample
from unirl.types.segment import TextSegment

README = Path(__file__).parents[4] / "unirl/distributed/tensor/README.md"


def slab_of(ranks: int, plane: DataPlane | None) -> Slab:
    return Slab(HostedLauncher("main", ranks, plane=plane, dp=ranks))


@pytest.fixture
def transport() -> Counting:
    return Counting()


@pytest.fixture
def studio(transport: Counting) -> Iterator[Handle[Studio]]:
    """Of two ranks, which keep every row in a parcel of its own."""
    with slab_of(2, DataPlane(transport, parcel_bytes=1)) as slab:
        yield slab.spawn(Studio)


def test_pictures_latents_and_conditions_stay_with_the_rank_that_made_them(studio: Handle[Studio]) -> None:
    part = studio.draw(request(3)).frontier
    for field in (part.media, part.segment, part.conditions):
        assert isinstance(field, FieldRef)
        assert [parcel.origin for parcel in field.parcels] == [
            *["in Studio.draw on rank 0 of slab main"] * 4,
            *["in Studio.draw on rank 1 of slab main"] * 2,
        ]
    assert part.version is not None
    assert part.version.tolist() == [1] * 6


@pytest.mark.parametrize("parcel_bytes", [1, 2000, 2**20])
def test_ranks_that_keep_their_rows_give_what_one_process_gives(parcel_bytes: int) -> None:
    results = []
    for ranks, plane in ((1, None), (2, DataPlane(InProcess(), parcel_bytes)), (3, DataPlane(InProcess(), 2**20))):
        with slab_of(ranks, plane) as slab:
            studio = slab.spawn(Studio)
            drawn = studio.same(studio.brighten(studio.draw(request(5))))
            results.append((resolved(drawn), values(studio.light(drawn.with_frontier(drawn.frontier)))))
    (whole, light), *others = results
    for sample, figures in others:
        assert_same_sample(sample, whole)
        assert figures == light == {"light": 2 * 3 * 16 * 5}  # five of ten pictures are not black


def test_driver_operations_ask_for_nothing(studio: Handle[Studio], transport: Counting) -> None:
    """select, split, concat, fork, rewards and advantages: all of a trainer's own work between two calls."""
    sample = studio.draw(request(4))
    pieces = sample.split([1, 3])
    part = Sample.concat(pieces).frontier.select([3, 0, 1, 2, 4, 5, 6, 7])
    part = dataclasses.replace(part, rewards=torch.arange(8.0)).compute_advantages("global")
    Sample.concat(pieces).fork(2, SAMPLING)
    assert transport.asked == []
    assert isinstance(part.segment, FieldRef)
    assert len(part.segment) == 8


def test_a_method_is_brought_the_fields_that_it_reads_and_its_own_rows(
    studio: Handle[Studio], transport: Counting
) -> None:
    sample = studio.draw(request(3))
    assert values(studio.first(sample)) == {"light": 3 * 16 * 3.0}
    media = sample.frontier.media
    assert isinstance(media, FieldRef)
    assert transport.asked == list(media.parcels)
    transport.asked.clear()
    studio.light(sample.split([2, 1])[1])
    assert transport.asked == list(media.parcels[4:])


def test_what_a_method_does_not_read_comes_back_as_the_same_reference(studio: Handle[Studio]) -> None:
    sample = studio.draw(request(3))
    brighter = studio.brighten(sample).frontier
    assert brighter.segment == sample.frontier.segment
    assert brighter.conditions == sample.frontier.conditions
    assert brighter.media != sample.frontier.media


def test_what_a_method_hands_on_is_not_kept_twice(studio: Handle[Studio]) -> None:
    sample = studio.draw(request(3))
    again = studio.same(sample)
    assert again.frontier.media == sample.frontier.media
    assert again.frontier.segment == sample.frontier.segment


def test_texts_and_responses_are_values_for_the_driver() -> None:
    plane = DataPlane(InProcess())
    flags = torch.ones(2, dtype=torch.bool)
    text = TextSegment(torch.arange(2), torch.zeros(2), flags, torch.tensor([1, 1]), ~flags)
    part = Part(ids=["r0.p0", "r0.p1"], metadata=[{}, {}], media=Media(texts=["a", "b"]), segment=text)
    assert plane.parked(part, "here", {}) is part
    drawn = dataclasses.replace(part, segment=trajectory())
    assert isinstance(plane.parked(drawn, "here", {}).segment, FieldRef)


def test_batches_inside_batches_and_containers_are_looked_into() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Outer(Rows):
        holder: Holder = nested()

    plane, inner = DataPlane(InProcess()), everything([2, 1])
    value: dict[str, Any] = {"a": [Outer(Holder(inner)), 3], "b": (inner,)}
    parked = plane.parked(value, "here", {})
    assert isinstance(parked["a"][0].holder.content, FieldRef)
    assert parked["b"][0] is inner  # not a heavy field of anything
    assert_same(resolved(parked)["a"][0].holder.content, inner)
    assert resolved(value) is value


def test_rows_are_freed_with_their_last_reference() -> None:
    studio = slab_of(2, DataPlane(InProcess())).spawn(Studio)
    sample = studio.draw(request(3))
    media = sample.frontier.media
    assert isinstance(media, FieldRef)
    kept = weakref.ref(media.parcels[0].ticket)
    brighter = studio.brighten(sample)
    del media, sample
    gc.collect()
    assert kept() is None
    assert isinstance(brighter.frontier.segment, FieldRef)


def test_an_override_reads_what_the_method_read_that_it_overrides() -> None:
    class Bright(Studio):
        def brighten(self, sample: Sample) -> Sample:
            return sample

    assert Bright.reads("brighten") == ("media",)
    assert Bright.reads("draw") is None


def test_a_rank_that_does_not_speak_keeps_nothing(transport: Counting) -> None:
    """Of two tensor-parallel ranks the first one answers."""
    hosts = [RankHost("main", RankInfo(rank, 2, tp=2), DataPlane(transport)) for rank in range(2)]
    for host in hosts:
        host.build(0, Studio, Call((), {}))
    spoken, dropped = (host.call(0, "draw", Call((request(1),), {})) for host in hosts)
    assert pictures(resolved(spoken)).sum() == 48
    with pytest.raises(ValueError, match=r"made in Studio\.draw on rank 1 of slab main were not kept: another rank"):
        resolved(dropped)


def test_an_unknown_transport_or_one_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transport must be one of \['object_store', 'direct', 'trans.*, got 'tcp'"):
        Placement(launcher="ray", transport="tcp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"placement\.transport=direct needs placement\.launcher=ray"):
        Placement(transport="direct")


@pytest.mark.parametrize(
    ("transport", "package", "extra"),
    [("direct", "nixl", "direct"), ("transfer_queue", "transfer_queue", "transfer-queue")],
)
def test_a_transport_that_is_not_installed_is_refused(
    transport: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ValueError, match=rf"{transport}, which needs {package}: pip install unirl\[{extra}\]"):
        Placement(launcher="ray", transport=transport)


def test_the_readme_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(example, {"__name__": "readme"})


def test_under_one_rank_in_the_process_nothing_is_a_reference() -> None:
    with slab_of(1, None) as slab:
        part = slab.spawn(Studio).draw(request(2)).frontier
    assert isinstance(part.media, Media)
