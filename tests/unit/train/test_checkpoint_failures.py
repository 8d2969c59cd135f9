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
        [sys.executable, "-c", script, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
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
KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from unirl.train.checkpoint import CheckpointStore

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
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        steps = pipe.read()
    confirmed = int.from_bytes(steps[-4:], "big") if steps else confirmed
    found = store.latest()
    assert found is not None and found.step >= confirmed, (found, confirmed)
    loaded = store.load(found, "cpu")
    assert loaded["cursor"] == {"row": found.step}
    assert torch.equal(loaded["weights"]["w"], state(found.step)["weights"]["w"])
    left = [path.name for path in store.folder.iterdir() if path.name.startswith(".")]
    return found.step, bool(left)

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
        step, left = examine(child, read, step)
        leftovers.append(left)
else:
    for call in ("fsync", "rename", "mkdir", "rmdir", "unlink", "open"):
        for count in range(1, 13):
            child, read = start(step + 1, lambda: die_at(call, count))
            step, left = examine(child, read, step)
            leftovers.append(left)
print(json.dumps([step, sum(leftovers), len(leftovers)]))
"""


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
