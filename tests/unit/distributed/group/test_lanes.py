"""Workers that are `beside` run while their siblings do: in one process, and in two ranks of Ray."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.rank_workers import WAIT, Aside, Base, Partner
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import Pending, WorkerLostError
from unirl.distributed.group.placement import Placement, Slab
from unirl.types.metric import values

TWO = Placement(launcher="ray", device="cpu", devices=2, deadline=120)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """A worker in each lane of a slab."""

    slab: Slab
    aside: Handle[Aside]
    partner: Handle[Partner]

    @classmethod
    def of(cls, slab: Slab) -> Lanes:
        aside = slab.spawn(Aside)
        return cls(slab, aside, slab.spawn(Partner, slab.spawn(Base), aside))

    def met(self, *pending: Pending[Any]) -> bool:
        """Whether all of these calls met the other lane, on every rank."""
        return all(values(one.result()) == {"met": self.slab.size} for one in pending)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    if request.param == "ray":
        request.getfixturevalue("ray")
    with (TWO if request.param == "ray" else Placement(device="cpu")).slab() as slab:
        yield Lanes.of(slab)


@pytest.fixture
def own(ray: None) -> Iterator[Lanes]:
    """In a slab that may be broken."""
    with TWO.slab("own") as slab:
        yield Lanes.of(slab)


def wait_until_done(pending: Pending[Any]) -> None:
    until = time.monotonic() + WAIT
    while not pending.done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_each_lane_waits_for_the_other_one_whichever_starts_first(lanes: Lanes) -> None:
    """Without the overlap neither would ever meet; the ranks meet each other meanwhile."""
    assert lanes.met(lanes.partner.meet.start(), lanes.aside.meet.start())
    assert lanes.met(lanes.aside.meet.start(), lanes.partner.meet.start())


def test_calls_of_a_lane_run_in_order_and_are_known_to_be_done_while_the_other_lane_is_busy(lanes: Lanes) -> None:
    meeting = lanes.partner.meet.start()
    noted = [lanes.aside.note.start(text) for text in "abc"]
    wait_until_done(noted[-1])
    assert [one.done() for one in noted] == [True, True, True]
    assert not meeting.done()
    assert lanes.aside.order() == ("a", "b", "c")
    assert lanes.met(lanes.aside.meet.start(), meeting)


def test_a_failure_in_a_lane_is_its_own(lanes: Lanes) -> None:
    meeting = lanes.partner.meet.start()
    with pytest.raises(ArithmeticError, match="a score is NaN") as caught:
        lanes.aside.fail()
    assert caught.value.__notes__[0].startswith("in Aside.fail on rank ")
    assert lanes.met(lanes.aside.meet.start(), meeting)
    meeting = lanes.aside.meet.start()
    with pytest.raises(FloatingPointError, match="loss of rank 0 is NaN"):
        lanes.partner.fail((0,))
    assert lanes.met(lanes.partner.meet.start(), meeting)


@pytest.mark.ray
@pytest.mark.slow
def test_closing_waits_for_both_lanes_and_drops_what_waits_for_its_turn_beside(own: Lanes) -> None:
    resting, dropped = own.aside.rest.start(5.0), own.aside.note.start("late")
    meeting = own.partner.meet.start()
    own.slab.close()
    assert own.met(meeting)
    assert resting.result() is None
    with pytest.raises(ValueError, match=r"slab own is closed: its workers cannot be called any more \(note\)"):
        dropped.result()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("asked_first", ["partner", "aside"])
def test_a_rank_that_dies_with_both_lanes_busy_is_named_once(own: Lanes, asked_first: str) -> None:
    aside, partner = own.aside.hang.start(1), own.partner.die.start(1, signal.SIGKILL)
    first, second = (partner, aside) if asked_first == "partner" else (aside, partner)
    with pytest.raises(WorkerLostError, match=r"slab own lost rank 1 .* in (Partner\.die|Aside\.hang): .*SIGKILL"):
        first.result()
    with pytest.raises(WorkerLostError, match=r"cannot run (Partner\.die|Aside\.hang): .* has broken it .*SIGKILL"):
        second.result()


@pytest.mark.ray
@pytest.mark.slow
def test_a_call_beside_the_others_that_takes_too_long_breaks_the_slab(
    own: Lanes, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts from its start, and the driver may come late to one that was done in time."""
    noted = own.aside.note.start("in time")
    wait_until_done(noted)
    hanging = own.aside.hang.start(1)
    assert values(own.partner.ranks()) == {"ranks": 4, "processes": 2}
    cast(Any, own.slab)._launcher._deadline = 0.001
    assert noted.result() is None
    with pytest.raises(TimeoutError, match=r"Aside\.hang took longer than .*=0\.001 s on ranks 1 of slab own"):
        hanging.result()
    assert "rank 1 of slab own hangs in Aside.hang" in caplog.text
    assert "_sleep_aside" in caplog.text
    with pytest.raises(RuntimeError, match=r"slab own cannot run Partner\.ranks: Aside\.hang has broken it"):
        own.partner.ranks()
