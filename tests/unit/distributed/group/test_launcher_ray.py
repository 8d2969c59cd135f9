"""Two ranks in Ray actors. Every test that leaves them whole shares one slab; the cluster is that of the session."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tests.rank_workers import Base, Worker
from unirl.distributed.group.dispatch import Call
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement, Slab
from unirl.distributed.group.rank_info import RankInfo
from unirl.types.media import Media
from unirl.types.metric import values

if TYPE_CHECKING:
    from unirl.distributed.group.rank_actor import Process

pytestmark = pytest.mark.ray

TWO = Placement(launcher="ray", device="cpu", devices=2, deadline=120)


@contextlib.contextmanager
def worker_of(slab: Slab) -> Iterator[Handle[Worker]]:
    with slab:
        base = slab.spawn(Base, "!")
        yield slab.spawn(Worker, base, [base], {"base": base})


@pytest.fixture(autouse=True)
def connected(ray: None) -> None:
    """To the cluster of the session."""


@pytest.fixture(scope="module")
def worker(ray: None) -> Iterator[Handle[Worker]]:
    with worker_of(TWO.slab("main")) as worker:
        yield worker


@pytest.fixture
def own() -> Iterator[Handle[Worker]]:
    """A worker in a slab that may be broken."""
    with worker_of(TWO.slab("own")) as worker:
        yield worker


def media(*texts: str) -> Media:
    return Media(texts=list(texts))


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def processes(worker: Handle[Worker]) -> list[Process]:
    return list(cast(Any, worker.launcher)._processes.values())


def are_gone(processes: list[Process]) -> bool:
    from unirl.distributed.group.autopsy import is_gone

    return all(is_gone(process) for process in processes)


def test_rows_are_shared_out_and_come_back_in_order(worker: Handle[Worker]) -> None:
    assert worker.shout(media("a", "b", "c")).texts == ["A!@0", "B!@0", "C!@1"]
    assert worker.shout(media("a"), mark="?").texts == ["A?!@0"]


def test_the_ranks_are_joined_and_one_without_rows_takes_part(worker: Handle[Worker]) -> None:
    assert values(worker.ranks()) == {"ranks": 4, "processes": 2}
    assert values(worker.count(media("a", "b", "c"))) == {"rows": 6}
    assert values(worker.count(media("a"))) == {"rows": 1}


def test_a_handle_becomes_the_instance_of_the_same_rank(worker: Handle[Worker]) -> None:
    assert worker.sibling_is_mine()


def test_calls_run_in_the_order_they_were_started_while_the_driver_goes_on(worker: Handle[Worker]) -> None:
    before = worker.order()
    pending = [worker.shout.start(media(text, "x")) for text in "abc"]
    worker.shout(media("d", "x"))
    assert worker.order()[len(before) :] == ("a", "b", "c", "d")
    assert [one.result().texts for one in reversed(pending)] == [[f"{t}!@0", "X!@1"] for t in "CBA"]
    assert pending[0].result().texts == ["A!@0", "X!@1"]


def test_a_failure_keeps_its_type_and_says_where_and_the_ranks_go_on(worker: Handle[Worker]) -> None:
    with pytest.raises(FloatingPointError, match="loss of rank 1 is NaN") as caught:
        worker.fail((1,))
    assert caught.value.__notes__[0] == "in Worker.fail on rank 1 of slab main"
    assert "rank_workers.py" in notes(caught.value)
    assert "loss of rank 1 is NaN" in notes(caught.value)
    assert values(worker.ranks()) == {"ranks": 4, "processes": 2}


def test_of_several_failures_the_first_in_time_is_raised(worker: Handle[Worker]) -> None:
    with pytest.raises(FloatingPointError, match="rank 0"):
        worker.fail((0, 1), after=(0, 0.3))
    with pytest.raises(FloatingPointError, match="rank 1"):
        worker.fail((0, 1), after=(0.3, 0))


def test_an_exception_that_cannot_be_sent_is_told(worker: Handle[Worker]) -> None:
    with pytest.raises(RuntimeError, match="Unsendable: one and two") as caught:
        worker.fail_unsendably()
    assert re.fullmatch(r"in Worker.fail_unsendably on rank [01] of slab main", caught.value.__notes__[0])


def test_a_constructor_that_fails_says_where(worker: Handle[Worker]) -> None:
    with pytest.raises(TypeError) as caught:
        Slab(worker.launcher).spawn(Worker)
    assert re.fullmatch(r"in Worker.__init__ on rank [01] of slab main", caught.value.__notes__[0])


def test_what_ranks_print_and_log_reaches_the_driver_with_their_names(
    worker: Handle[Worker], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    worker.say("good day")
    assert capsys.readouterr().err.splitlines() == ["[main 0] good day", "[main 1] good day"]
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("tests.voice", "WARNING", "[main 0] good day, louder"),
        ("tests.voice", "WARNING", "[main 1] good day, louder"),
    ]


def test_lines_that_two_threads_print_at_once_stay_whole() -> None:
    from unirl.distributed.group.rank_actor import Said, _Lines

    said: list[Said] = []
    stream = _Lines(said)
    stream.write("one half ")
    with ThreadPoolExecutor() as other:
        other.submit(stream.write, "between\n").result()
    stream.write("and the other\nlast")
    stream.end()
    assert [line.text for line in said] == ["between", "one half and the other", "last"]


def test_a_worker_has_one_thread_on_a_cpu_and_listens_on_loopback(worker: Handle[Worker]) -> None:
    assert worker.variable("OMP_NUM_THREADS") == "1"
    assert worker.variable("GLOO_SOCKET_IFNAME") == "lo"


def test_what_several_ranks_get_is_put_once(worker: Handle[Worker]) -> None:
    from unirl.distributed.group.launcher_ray import _packed

    big, own = torch.ones(1000), [torch.zeros(1000), torch.zeros(1000)]
    sent = _packed({rank: Call((own[rank], big, 3), {"again": big}) for rank in range(2)})
    assert [packed[1] is own[rank] for rank, packed in sent.items()] == [True, True]
    assert len({id(packed[position]) for packed in sent.values() for position in (2, 4)}) == 1
    assert sent[0][2] is not big
    assert [packed[3] for packed in sent.values()] == [3, 3]
    assert values(worker.mean_of(torch.full((300_000,), 2.0))) == {"mean": 4.0}


def test_slabs_hold_devices_of_their_own_until_they_are_closed(worker: Handle[Worker]) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    shared_memory = shared_memory_files()
    with worker_of(TWO.slab("other")) as other:
        assert ray.available_resources()["CPU"] == free - 2
        own = processes(other)
        assert not {one.pid for one in own} & {one.pid for one in processes(worker)}
        slow = worker.fail.start((0, 1), after=(0.2, 0.2))
        assert other.shout(media("a", "b")).texts == ["A!@0", "B!@1"]
        with pytest.raises(FloatingPointError):
            slow.result()
        check_a_kill_in_a_collective(other)
    assert are_gone(own)
    wait_until(lambda: ray.available_resources()["CPU"] == free)
    assert shared_memory_files() == shared_memory
    with pytest.raises(ValueError, match=r"slab other is closed.*shout"):
        other.shout(media("a"))
    assert ray.is_initialized()


def shared_memory_files() -> set[str]:
    """Those of Ray and of torch; semaphores are of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def wait_until(condition: Callable[[], bool]) -> None:
    """Ray hears of resources that were given back within a second or so."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def check_a_kill_in_a_collective(worker: Handle[Worker]) -> None:
    """A lost rank is named with its process and the signal; what came before it is whole, what comes after refused."""
    before = worker.shout.start(media("a"))
    with pytest.raises(
        WorkerLostError, match=r"slab other lost rank 1 \(process \d+ on .*\) in Worker\.die: .*SIGKILL"
    ):
        worker.die(1, signal.SIGKILL)
    assert before.result().texts == ["A!@0"]
    with pytest.raises(WorkerLostError, match=r"slab other cannot run Worker\.order: Worker\.die has broken it"):
        worker.order()


@pytest.mark.slow
def test_one_rank_needs_no_others() -> None:
    with worker_of(Placement(launcher="ray", device="cpu", devices=1, deadline=120).slab()) as worker:
        assert values(worker.ranks()) == {"ranks": 1, "processes": 1}
        assert worker.launcher.ranks == (RankInfo(0, 1),)


@pytest.mark.slow
def test_ranks_that_share_rows_get_the_same_ones_and_know_their_place() -> None:
    with worker_of(Placement(launcher="ray", device="cpu", devices=4, tp=2, deadline=120).slab()) as worker:
        assert worker.launcher.ranks == tuple(RankInfo(rank, 4, dp=2, tp=2) for rank in range(4))
        assert worker.shout(media("a", "b", "c")).texts == ["A!@0", "B!@0", "C!@2"]
        assert values(worker.ranks()) == {"ranks": 4, "processes": 2}


@pytest.mark.slow
def test_closing_waits_for_what_is_under_way_and_a_keyboard_interrupt_does_not(own: Handle[Worker]) -> None:
    slow = own.fail.start((0,), after=(0.5, 0))
    own.launcher.close()
    with pytest.raises(FloatingPointError):
        slow.result()
    assert are_gone(processes(own))
    interrupted: list[Process] = []
    with pytest.raises(KeyboardInterrupt):
        hang_and_interrupt(interrupted)
    assert interrupted
    assert are_gone(interrupted)


def hang_and_interrupt(ranks: list[Process]) -> None:
    with worker_of(TWO.slab("interrupted")) as worker:
        ranks += processes(worker)
        worker.hang.start(1)
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "cause"),
    [(signal.SIGSEGV, r"it crashed \(Segmentation fault\)"), (signal.SIGABRT, r"it crashed \(Aborted\)")],
)
def test_a_crash_is_named(own: Handle[Worker], by: signal.Signals, cause: str) -> None:
    with pytest.raises(WorkerLostError, match=rf"slab own lost rank 0 .* in Worker\.die: {cause}"):
        own.die(0, by)


@pytest.mark.slow
def test_what_ends_a_worker_ends_the_driver_as_in_one_process(own: Handle[Worker]) -> None:
    with pytest.raises(SystemExit) as caught:
        own.leave(1)
    assert caught.value.code == 3


@pytest.mark.slow
def test_a_rank_that_fails_while_others_wait_for_it_is_the_cause_and_breaks_the_slab(own: Handle[Worker]) -> None:
    with pytest.raises(FloatingPointError, match="loss of rank 1"):
        own.fail((1,), then_meet=True)
    with pytest.raises(RuntimeError, match=r"Worker\.fail has broken it \(FloatingPointError: loss of rank 1 is NaN\)"):
        own.order()


@pytest.mark.slow
def test_a_call_that_takes_too_long_names_the_ranks_and_where_they_hang(
    own: Handle[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    cast(Any, own.launcher)._deadline = 1.0
    with pytest.raises(TimeoutError, match=r"Worker\.hang took longer than .*=1 s on ranks 1 of slab own"):
        own.hang(1)
    assert "rank 1 of slab own hangs in Worker.hang" in caplog.text
    assert "_sleep_for_ever" in caplog.text


def test_more_devices_than_the_cluster_has_are_refused_with_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"placement\.devices=24: the Ray cluster has 16 CPUs on 1 nodes \(16\)"):
        Placement(launcher="ray", device="cpu", devices=24).slab()
    with pytest.raises(ValueError, match="the Ray cluster has no GPU"):
        Placement(launcher="ray", device="cuda", devices=1).slab()
    with pytest.raises(ValueError, match="this process is connected to Ray at 127"):
        Placement(launcher="ray", address="10.0.0.1:6379").slab()


def test_devices_that_others_hold_are_waited_for_no_longer_than_the_deadline(worker: Handle[Worker]) -> None:
    with pytest.raises(ValueError, match=r"placement\.devices=16: they did not come free in 0\.5 s; free are \d+ CPUs"):
        Placement(launcher="ray", device="cpu", devices=16, deadline=0.5).slab()
