"""Clusters that a run starts for itself: where they listen, what of them stays, and how a run in one is stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.integration.runs import metrics, overrides
from tests.rank_workers import Base, Worker
from unirl.distributed.group.launcher import WorkerLostError
from unirl.distributed.group.placement import Placement
from unirl.types.media import Media
from unirl.types.metric import values

pytestmark = pytest.mark.ray

TWO = ("placement={launcher: ray, device: cpu, devices: 2, deadline: 300}", "train.backend.sharding={mode: none}")
LISTEN = """\
import json, os
from tests.integration.test_ray_clusters import listening, members
from unirl.distributed.group.placement import Placement
with Placement(launcher="ray", device="cpu", devices=2, deadline=200).slab():
    print(json.dumps(sorted(listening(members(os.getpid())))))
"""


def command(output: Path, *settings: str) -> list[str]:
    """A run of two ranks with a cluster of its own."""
    words = [sys.executable, "-m", "unirl.train_diffusion", "diffusion/digits"]
    return [*words, *overrides("flow_grpo", output, steps=400), *TWO, "run.save_every=100", *settings]


def environment(home: Path) -> dict[str, str]:
    """Without the session's cluster, and with a home of its own."""
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}


def members(leader: int) -> dict[int, str]:
    """The processes whose session is that of `leader`, with their command lines, zombies apart."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            name = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended
            continue
        if int(session) == os.getsid(leader) and state != "Z":
            found[int(process.name)] = name
    return found


def listening(processes: dict[int, str]) -> set[str]:
    """Addresses, without ports, on which these processes wait for TCP connections."""
    sockets = set()
    for pid in processes:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            if descriptor.is_symlink() and (target := os.readlink(descriptor)).startswith("socket:["):
                sockets.add(target[8:-1])
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and words[9] in sockets}


def check_nothing_stays(session: dict[int, str], run: subprocess.Popen[bytes], shared_memory: set[str]) -> None:
    """Of a run that has ended: no process, no folder of its cluster, no shared memory."""
    assert [name for pid, name in session.items() if Path(f"/proc/{pid}").exists() and pid != run.pid] == []
    folders = set(re.findall(r"/tmp/unirl-ray-\w+", " ".join(session.values())))
    assert len(folders) == 1
    assert [folder for folder in folders if Path(folder).exists()] == []
    assert in_shared_memory() - shared_memory == set()


def in_shared_memory() -> set[str]:
    """Semaphores of multiprocessing apart: they are of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@contextmanager
def under_way(output: Path, lines: int) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a session of its own, from its `lines`th line on."""
    log = output / "run" / "metrics.jsonl"
    with (output.parent / "said").open("w") as said, subprocess.Popen(
        command(output), stdout=said, stderr=said, env=environment(output.parent / "home"), start_new_session=True
    ) as run:  # fmt: skip
        try:
            wait_until(lambda: log.exists() and log.read_text().count("\n") >= lines, run)
            yield run
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[bytes] | None = None, seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        assert run is None or run.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
def test_a_cluster_of_its_own_listens_on_loopback_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTEN], capture_output=True, text=True, env=environment(tmp_path / "home"),
        start_new_session=True, timeout=280, check=True,
    )  # fmt: skip
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(json.loads(done.stdout)) <= loopback
    assert done.stderr == ""
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_the_step_closes_the_ranks_and_leaves_nothing(stop: signal.Signals, tmp_path: Path) -> None:
    shared = in_shared_memory()
    output = tmp_path / "run"
    with under_way(output, 3) as run:
        session = members(run.pid)
        assert sum("ray::RankActor" in name for name in session.values()) == 2
        if stop == signal.SIGINT:
            os.killpg(run.pid, stop)  # as a terminal does
        else:
            run.send_signal(stop)
        assert run.wait(200) == 130
        check_nothing_stays(session, run, shared)
    stopped_at = metrics(output)[-1]["step"]
    assert f"saved step {stopped_at} of 400; the same command continues it" in (tmp_path / "said").read_text()
    assert (output / "run" / "checkpoints" / f"step_{stopped_at}").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_ctrl_c_kills_the_ranks_at_once(tmp_path: Path) -> None:
    shared = in_shared_memory()
    with under_way(tmp_path / "run", 3) as run:
        session = members(run.pid)
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert run.wait(60) == 130
        check_nothing_stays(session, run, shared)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_of_a_driver_that_is_killed_no_process_stays(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", 3) as run:
        session = members(run.pid)
        run.kill()
        run.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in session), seconds=120)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_share_a_slab_and_one_that_is_lost_is_waited_for(tmp_path: Path) -> None:
    script = "from tests.integration.test_ray_clusters import two_nodes; two_nodes()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(tmp_path / "home"),
        start_new_session=True, timeout=580,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "all is well", done.stderr


def two_nodes() -> None:
    """Ray's own cluster of several nodes on one machine; in a process that is connected to no other one."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    second = cluster.add_node(num_cpus=2)
    place = Placement(launcher="ray", device="cpu", devices=4, tp=2, address=cluster.address, deadline=200)
    try:
        with pytest.raises(ValueError, match=r"has 4 CPUs on 2 nodes \(2, 2\), 0 of them usable .* tp x sp = 4"):
            dataclasses.replace(place, tp=4).slab()
        with place.slab("wide") as wide:
            worker = wide.spawn(Worker, wide.spawn(Base))
            processes = list(cast(Any, worker.launcher)._processes.values())
            assert [one.node == processes[0].node for one in processes] == [True, True, False, False]
            assert values(worker.ranks()) == {"ranks": 4, "processes": 2}
            assert [text[-1] for text in worker.shout(Media(texts=["a", "b"])).texts or ()] == ["0", "2"]
            waiting = worker.fail.start((9,), then_meet=True)
            waiting.result()
            lost = worker.hang.start(3)
            cluster.remove_node(second, allow_graceful=False)
            with pytest.raises(WorkerLostError, match=r"slab wide lost rank [23] .* in Worker\.hang: its node is gone"):
                lost.result()
        with ThreadPoolExecutor(1) as thread:
            started = thread.submit(place.slab, "again", in_place_of=wide)
            time.sleep(5)
            assert not started.done()
            cluster.add_node(num_cpus=2)
        with started.result() as again:
            assert values(again.spawn(Worker, again.spawn(Base)).ranks()) == {"ranks": 4, "processes": 2}
        assert not ray.is_initialized()
        assert all(node.any_processes_alive() for node in cluster.list_all_nodes())
    finally:
        cluster.shutdown()
    sys.stdout.write("all is well\n")
