"""A disk that fills up stops a run in one line; with space again, the same command ends as if nothing had happened."""

from __future__ import annotations

import resource
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.integration.runs import RECIPES, metrics, overrides, processes, start_command, state
from tests.unit.types.same import assert_same

STEPS = 40


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return processes()


@pytest.fixture(scope="module")
def whole(context: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on a disk with space."""
    output = tmp_path_factory.mktemp("whole")
    finish(context, output)
    return output


def command(output: Path, every: int) -> list[str]:
    return ["train", RECIPES["flow_grpo"][0], *overrides("flow_grpo", output, steps=STEPS), f"run.save_every={every}"]


def finish(context: ForkServerContext, output: Path, every: int = 2) -> None:
    process = start_command(context, command(output, every), output / "said")
    process.join(100)
    assert process.exitcode == 0, (output / "said").read_text()


@pytest.mark.parametrize(
    ("room", "every", "refused"),
    [
        (100_000, 2, "could not save {run}/checkpoints/step_{step}: File too large. Still good: step_{good}, where"),
        # So long between checkpoints that the limit comes before the next one, however late this process is.
        (0, 15, "{run}/metrics.jsonl: File too large. Still good: step_{good}, where the same command resumes"),
    ],
)
def test_a_full_disk_ends_in_one_line_and_the_same_command_goes_on(
    room: int, every: int, refused: str, context: ForkServerContext, whole: Path, tmp_path: Path
) -> None:
    """room: bytes that a file may have beyond the present metrics.jsonl, fewer than a checkpoint takes

    every: steps between checkpoints
    """
    run, said = tmp_path / "run", tmp_path / "said"
    process = start_command(context, command(tmp_path, every), said)
    deadline = time.monotonic() + 100
    while not (run / "checkpoints" / f"step_{every}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.pid is not None
    limit = (run / "metrics.jsonl").stat().st_size + room
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    process.join(100)
    assert process.exitcode == 1

    good = max(int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*"))
    errors = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert refused.format(run=run, good=good, step=good + every) in errors[0]
    assert "Traceback" not in said.read_text()
    assert not list((run / "checkpoints").glob(".*"))

    finish(context, tmp_path, every)
    assert metrics(tmp_path) == metrics(whole)
    assert_same(state(tmp_path), state(whole))
