"""Clusters that a run starts for itself: where they listen, what of them stays, and how a run in one is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.runs import metrics, overrides

pytestmark = pytest.mark.ray

TWO = ("placement={launcher: ray, device: cpu, devices: 2, deadline: 300}", "train.backend.sharding={mode: none}")
LISTEN = """\
import os
from tests.integration.test_ray_clusters import listening, members
from unirl.distributed.group.placement import Placement
with Placement(launcher="ray", device="cpu", devices=2, deadline=200).slab():
    print(sorted(listening(members(os.getpid()))))
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


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def folders() -> set[str]:
    return {path.name for path in Path("/tmp").glob("unirl-ray-*")}


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


def wait_until(condition, run: subprocess.Popen[bytes] | None = None, seconds: float = 400) -> None:
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
    assert set(eval(done.stdout)) <= loopback
    assert done.stderr == ""
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_the_step_closes_the_ranks_and_leaves_nothing(stop: signal.Signals, tmp_path: Path) -> None:
    before = shared_memory(), folders()
    output = tmp_path / "run"
    with under_way(output, 3) as run:
        session = members(run.pid)
        assert sum("ray::RankActor" in name for name in session.values()) == 2
        os.killpg(run.pid, stop) if stop == signal.SIGINT else run.send_signal(stop)  # Ctrl-C goes to the whole group
        assert run.wait(200) == 130
        wait_until(lambda: not any(pid in session for pid in members(os.getpid())), seconds=1)
        assert [pid for pid in session if Path(f"/proc/{pid}").exists() and pid != run.pid] == []
    stopped_at = metrics(output)[-1]["step"]
    assert f"saved step {stopped_at} of 400; the same command continues it" in (tmp_path / "said").read_text()
    assert (output / "run" / "checkpoints" / f"step_{stopped_at}").exists()
    assert (shared_memory(), folders()) == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_ctrl_c_kills_the_ranks_at_once(tmp_path: Path) -> None:
    before = shared_memory(), folders()
    with under_way(tmp_path / "run", 3) as run:
        session = members(run.pid)
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert run.wait(60) == 130
        assert [pid for pid in session if Path(f"/proc/{pid}").exists() and pid != run.pid] == []
    assert (shared_memory(), folders()) == before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_of_a_driver_that_is_killed_no_process_stays(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", 3) as run:
        session = members(run.pid)
        run.kill()
        run.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in session), seconds=120)
