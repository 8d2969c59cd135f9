"""Calls of a handle that are waited for later."""

from __future__ import annotations

import threading

import pytest

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.placement import Placement
from unirl.distributed.group.remote import Remote, remote
from unirl.types.media import Media


class Recorder(Remote):
    def __init__(self, gate: threading.Event, seen: list[str] | None = None) -> None:
        self.gate = gate
        self.seen = [] if seen is None else seen

    @remote(Dispatch.DP_SCATTER)
    def held(self, batch: Media) -> Media:
        assert self.gate.wait(timeout=20)
        return self.noted(batch)

    @remote(Dispatch.DP_SCATTER)
    def noted(self, batch: Media) -> Media:
        assert batch.texts is not None
        self.seen += batch.texts
        return batch

    @remote(Dispatch.RANK_ZERO)
    def order(self) -> tuple[str, ...]:
        return tuple(self.seen)

    @remote(Dispatch.RANK_ZERO)
    def fail(self) -> None:
        raise FloatingPointError("not finite")


def test_a_started_call_leaves_the_driver_free_and_gives_what_a_call_gives() -> None:
    gate = threading.Event()
    with Placement(device="cpu").slab() as slab:
        recorder = slab.spawn(Recorder, gate)
        pending = recorder.held.start(Media(texts=["a"]))
        assert not pending.done()
        gate.set()  # reached only because nobody waits
        assert pending.result().texts == ["a"]
        assert pending.done()
        assert pending.result().texts == ["a"]


def test_calls_of_one_worker_run_in_the_order_they_were_started() -> None:
    gate = threading.Event()
    with Placement(device="cpu").slab() as slab:
        recorder = slab.spawn(Recorder, gate)
        for text in "abc":
            recorder.held.start(Media(texts=[text]))
        threading.Timer(0.05, gate.set).start()
        recorder.noted(Media(texts=["d"]))
        assert recorder.order() == ("a", "b", "c", "d")


def test_a_failure_keeps_its_type_and_says_where() -> None:
    with Placement(device="cpu").slab() as slab:
        pending = slab.spawn(Recorder, threading.Event()).fail.start()
        with pytest.raises(FloatingPointError, match="not finite") as caught:
            pending.result()
        assert caught.value.__notes__ == ["in Recorder.fail on rank 0 of slab main"]


def test_wrong_arguments_are_refused_when_the_call_is_started() -> None:
    with (
        Placement(device="cpu").slab() as slab,
        pytest.raises(ValueError, match="a scattered call needs an argument"),
    ):
        slab.spawn(Recorder, threading.Event()).noted.start(3)


def test_closing_waits_for_what_is_under_way() -> None:
    gate = threading.Event()
    with Placement(device="cpu").slab() as slab:
        pending = slab.spawn(Recorder, gate).held.start(Media(texts=["late"]))
        threading.Timer(0.05, gate.set).start()
    assert pending.result().texts == ["late"]


def test_closing_drops_what_waits_for_its_turn() -> None:
    gate = threading.Event()
    seen: list[str] = []
    with Placement(device="cpu").slab() as slab:
        recorder = slab.spawn(Recorder, gate, seen)
        recorder.held.start(Media(texts=["under way"]))
        recorder.held.start(Media(texts=["queued"]))
        threading.Timer(0.05, gate.set).start()
    assert seen == ["under way"]
