"""Full disks and killed processes: real ones, in subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.train.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[3]


def run_script(script: str, *args: str) -> str:
    """What it writes; it finds this checkout's `unirl` because it starts in its root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL_DISK = """
import json, resource, sys
from pathlib import Path
import torch
from unirl.train.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]) / "checkpoints", keep_last=1, keep_best=0)
small, large = {"weights": torch.ones(8)}, {"first": torch.ones(8), "weights": torch.ones(1_000_000)}
report = []
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for step, state in ((1, large), (2, small), (3, large), (4, small)):
    try:
        store.save(step, state, score=None)
        report.append("saved")
    except OSError as error:
        report.append([type(error).__name__, error.errno, str(error)])
    report.append(sorted(path.name for path in store.folder.iterdir()))
print(json.dumps(report))
"""


def test_a_disk_that_refuses_leaves_the_last_good_one_and_says_what_to_do(tmp_path):
    first, after_first, second, after_second, third, after_third, fourth, after_fourth = json.loads(
        run_script(FULL_DISK, str(tmp_path))
    )
    assert first[0] == "OSError"
    assert f"could not save {tmp_path}/checkpoints/step_1: File too large" in first[2]
    assert "There is no earlier checkpoint. To go on, free space there" in first[2]
    assert after_first == []
    assert (second, after_second) == ("saved", ["step_2"])
    assert f"could not save {tmp_path}/checkpoints/step_3" in third[2]
    assert "Still good: step_2, where the same command resumes" in third[2]
    assert after_third == ["step_2"]
    assert (fourth, after_fourth) == ("saved", ["step_4"])


# One process imports torch once and forks the savers: each is a process of its own that is killed for real.
SAVERS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from unirl.train.checkpoint import CheckpointStore

def left(store, savers, read, confirmed):
    '''The newest checkpoint and its parts: at least the step that dead savers last confirmed through `read`.'''
    for saver in savers:
        os.waitpid(saver, 0)
    with os.fdopen(read, "rb") as pipe:
        steps = pipe.read()
    confirmed = int.from_bytes(steps[-4:], "big") if steps else confirmed
    found = store.latest()
    assert found is not None and found.step >= confirmed, (found, confirmed)
    return found.step, store.load(found, "cpu")
"""

KILLS = (
    SAVERS
    + """
folder = Path(sys.argv[1])
store = CheckpointStore(folder / "checkpoints", keep_last=2, keep_best=1)

def state(step):
    return {"weights": {"w": torch.full((2000,), float(step))}, "cursor": {"row": step}}

def save_forever(first, confirm):
    for step in range(first, first + 100_000):
        store.save(step, state(step), score=float(step % 7))
        os.write(confirm, step.to_bytes(4, "big"))

def start(first, before):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        before()
        save_forever(first, write)
    os.close(write)
    return child, read

def examine(child, read, confirmed):
    step, loaded = left(store, [child], read, confirmed)
    assert loaded["cursor"] == {"row": step}
    assert torch.equal(loaded["weights"]["w"], state(step)["weights"]["w"])
    return step, any(path.name.startswith(".") for path in store.folder.iterdir())

def die_at(call, count):
    '''SIGKILL to itself instead of the `count`-th call of os.<call>.'''
    original, seen = getattr(os, call), []
    def counted(*args, **kwargs):
        seen.append(call)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(os, call, counted)

step, leftovers = 0, []
store.save(step, state(step), score=None)
if sys.argv[2] == "moments":
    moments = random.Random(0)
    for _ in range(50):
        child, read = start(step + 1, lambda: None)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        step, some = examine(child, read, step)
        leftovers.append(some)
else:
    for call in ("fsync", "rename", "mkdir", "rmdir", "unlink", "open"):
        for count in range(1, 13):
            child, read = start(step + 1, lambda: die_at(call, count))
            step, some = examine(child, read, step)
            leftovers.append(some)
print(json.dumps([step, sum(leftovers), len(leftovers)]))
"""
)


@pytest.mark.parametrize(("how", "kills"), [("moments", 50), ("calls", 72)])
def test_killed_at_any_moment_of_a_save_the_last_confirmed_step_or_a_newer_one_is_there(tmp_path, how, kills):
    step, interrupted, done = json.loads(run_script(KILLS, str(tmp_path), how))
    assert done == kills
    assert step > 0
    assert interrupted > kills // 5
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, keep_best=1)
    store.save(step + 1, {"weights": 0}, score=None)
    # The two newest, the best, and nothing half-written.
    assert len(list(store.folder.iterdir())) in (2, 3)


# Two ranks, and rank 0 is the driver as well. Both hold a half of one tensor, so both write a piece.
RANKS = (
    SAVERS
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from unirl.distributed.group.exchange import Exchange
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import join
from unirl.train.checkpoint import RankPart
from unirl.train.shards import ShardReader, ShardWriter

folder = Path(sys.argv[1])
store = CheckpointStore(folder / "checkpoints", keep_last=2, keep_best=0)

def tensor(step):
    return torch.full((2000,), float(step))

class Both(RankPart):
    def __init__(self, info, step):
        self.info, self.step = info, step
        self.writer, self.exchange = ShardWriter(info), Exchange(info)
        self.mesh = init_device_mesh("cpu", (2,))
    def write(self, folder, *, background):
        folder = Path(self.exchange.all(lambda: str(folder))[0])
        halves = {"w": distribute_tensor(tensor(self.step), self.mesh, [Shard(0)])}
        self.writer.start(folder, halves, {"step": self.step, "rank": self.info.rank}, background=background)
    def writing(self):
        return self.writer.writing()
    def written(self):
        return self.writer.finish()

def save_forever(rank, rendezvous, first, confirm, before):
    info = RankInfo(rank, 2, dp=2)
    join(info, rendezvous, device_type="cpu", timeout=10)
    part = Both(info, first)
    before(rank)
    while True:
        if rank == 0:
            store.start(part.step, {"backend": part, "cursor": part.step}, score=None, background=True).finish()
            os.write(confirm, part.step.to_bytes(4, "big"))
        else:
            part.write(None, background=True)
            part.written()
        part.step += 1

def start(first, before, number):
    read, write = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                save_forever(rank, f"file://{folder}/rendezvous{number}", first, write, before)
            except BaseException:
                os._exit(1)  # the other one is gone
        children.append(child)
    os.close(write)
    return children, read

def die_at(rank, count):
    def patch(own):
        seen, fsync = [], os.fsync
        def counted(descriptor):
            seen.append(descriptor)
            if len(seen) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)
        if own == rank:
            os.fsync = counted
    return patch

def examine(children, read, confirmed):
    step, loaded = left(store, children, read, confirmed)
    reader, whole = ShardReader(loaded["backend"]), torch.zeros(2000)
    reader.read({"w": whole})
    assert torch.equal(whole, tensor(step)) and loaded["cursor"] == step
    assert [reader.own(rank) for rank in range(2)] == [{"step": step, "rank": rank} for rank in range(2)]
    return step, sum(path.name.startswith(".partial") for path in store.folder.iterdir())

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
step, leftovers, kills = -1, [], 0
moments, number = random.Random(int(sys.argv[2])), 0
plans = [(rank, count) for rank, last in ((0, 18), (1, 8)) for count in range(9 if rank == 0 else 4, last)]
plans = plans if sys.argv[3] == "calls" else [None] * int(sys.argv[3])
for plan in plans:
    number += 1
    children, read = start(step + 1, die_at(*plan) if plan else lambda rank: None, number)
    if plan:
        os.waitid(os.P_PID, children[plan[0]], os.WEXITED | os.WNOWAIT)
    else:
        os.read(read, 4)
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(children[moments.randrange(2)], signal.SIGKILL)
    time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
    step, some = examine(children, read, step)
    leftovers.append(some)
print(json.dumps([step, sum(leftovers), len(leftovers)]))
"""
)


def test_killed_between_the_writes_of_two_ranks_the_last_confirmed_step_is_there_and_whole(tmp_path):
    step, interrupted, kills = json.loads(run_script(RANKS, str(tmp_path), "0", "calls"))
    assert kills == 13
    assert interrupted >= 8
    assert step > 0


@pytest.mark.slow
def test_two_ranks_killed_at_random_moments_leave_a_whole_checkpoint_every_time(tmp_path):
    step, interrupted, kills = json.loads(run_script(RANKS, str(tmp_path), "1", "25"))
    assert kills == 25
    assert interrupted > 2
    assert step > interrupted
