"""A run that is killed or interrupted and started again ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from tests.integration.runs import RECIPES, assert_equal, metrics, overrides, processes, start, state
from unirl.config.error import ConfigError
from unirl.observability.metrics import MetricsLog


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    context = processes()
    first = context.Process(target=time.monotonic)  # waits for the imports
    first.start()
    first.join(60)
    return context


def finish(context: ForkServerContext, kind: str, output: Path, steps: int = 6) -> float:
    """Run to the end; the seconds that it took."""
    began = time.monotonic()
    process = start(context, kind, output, steps=steps)
    process.join(120)
    assert process.exitcode == 0
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("kind", "steps", "kills"),
    [("flow_grpo", 150, 20)] + [(kind, 30, 3) for kind in RECIPES if kind != "flow_grpo"],
)
def test_a_run_killed_at_random_moments_ends_with_the_uninterrupted_weights_and_metrics(
    kind: str, steps: int, kills: int, context: ForkServerContext, tmp_path: Path
) -> None:
    finish(context, kind, tmp_path / "whole", steps)
    moments = random.Random(f"kills/{kind}")
    for _ in range(kills):
        process = start(context, kind, tmp_path / "killed", steps=steps)
        lines = moments.randrange(steps // kills)
        wait_for_lines(process, tmp_path / "killed", lines)
        # After a few more steps, anywhere in the next one or its save; before any, anywhere in the start-up.
        process.join(moments.uniform(0, 0.05 if lines else 1.0))
        process.kill()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    finish(context, kind, tmp_path / "killed", steps)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "whole")] == list(range(steps + 1))
    assert_equal(state(tmp_path / "killed"), state(tmp_path / "whole"))


def wait_for_lines(process: ForkServerProcess, output: Path, lines: int) -> None:
    """Until the run has written so many lines more than it found."""
    log = output / "run" / "metrics.jsonl"
    found = log.read_text().count("\n") if log.exists() else 0
    deadline = time.monotonic() + 120
    while lines and process.exitcode is None and time.monotonic() < deadline:
        now = log.read_text().count("\n") if log.exists() else 0
        found = min(found, now)  # a resume drops what came after its checkpoint
        if now >= found + lines:
            return
        time.sleep(0.002)


def test_ctrl_c_saves_the_step_under_way_and_the_same_command_continues(
    context: ForkServerContext, tmp_path: Path
) -> None:
    finish(context, "flow_grpo", tmp_path / "whole")
    command = [sys.executable, "-m", "unirl.train_diffusion", "diffusion/digits"]
    command += overrides("flow_grpo", tmp_path / "stopped")
    log = tmp_path / "stopped" / "run" / "metrics.jsonl"
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL, env=os.environ)
        deadline = time.monotonic() + 100
        while not (log.exists() and log.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    stopped_at = metrics(tmp_path / "stopped")[-1]["step"]
    if code == 0:  # the run was faster than the signal
        assert stopped_at == 6
    else:
        assert code == 130
        assert f"saved step {stopped_at} of 6; the same command continues it" in (tmp_path / "stderr").read_text()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "report.html" in done.stdout
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    # The global streams are not compared: packages that a new process imports late draw from Python's at import.
    stopped, whole = ({k: v for k, v in state(tmp_path / name).items() if k != "rng"} for name in ("stopped", "whole"))
    assert_equal(stopped, whole)


def test_evaluation_does_not_disturb_training(context: ForkServerContext, tmp_path: Path) -> None:
    from tests.integration.runs import RECIPES
    from unirl.config.run import load_recipe
    from unirl.trainer.diffusion import DiffusionTrainer

    for name, every in (("often", 1), ("rarely", 6)):
        changed = [*overrides("flow_grpo", tmp_path / name), f"eval.every={every}"]
        DiffusionTrainer(load_recipe(RECIPES["flow_grpo"][0], changed)).fit()
    assert_equal(state(tmp_path / "often"), state(tmp_path / "rarely"))
    both = [metrics(tmp_path / name) for name in ("often", "rarely")]
    trained = [[{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines] for lines in both]
    assert trained[0] == trained[1]


def test_a_folder_of_another_recipe_is_refused_before_anything_is_written(
    context: ForkServerContext, tmp_path: Path
) -> None:
    from tests.integration.runs import train
    from unirl.config.run import load_recipe
    from unirl.trainer.diffusion import DiffusionTrainer

    train("flow_grpo", str(tmp_path), steps=1)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    other = [*overrides("flow_grpo", tmp_path, steps=1), "train.backend.optimizer.lr=0.5"]
    with pytest.raises(ConfigError, match=r"train\.backend\.optimizer\.lr"):
        DiffusionTrainer(load_recipe("diffusion/digits", other)).fit()
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_run_whose_prompt_file_was_replaced_is_refused_and_goes_on_once_it_is_back(tmp_path: Path) -> None:
    from unirl.config.run import load_recipe
    from unirl.trainer.diffusion import DiffusionTrainer

    def train(steps: int) -> None:
        own = ["prompts@data.prompts=file", f"data.prompts.path={prompts}"]
        DiffusionTrainer(load_recipe("diffusion/digits", [*overrides("flow_grpo", tmp_path, steps=steps), *own])).fit()

    prompts = tmp_path / "prompts.jsonl"
    words = ("zero", "one", "two", "three")
    rows = [{"prompt": f"a handwritten {word}", "digit": digit} for digit, word in enumerate(words)]
    texts = ["".join(json.dumps(row) + "\n" for row in order) for order in (rows, rows[::-1])]
    prompts.write_text(texts[0])
    train(1)
    prompts.write_text(texts[1])
    with pytest.raises(ConfigError, match=r"run that began with other prompts in data\.prompts; put those back"):
        train(2)
    prompts.write_text(texts[0].replace(", ", " ,  "))
    train(2)
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2]


def test_checkpoints_fall_on_every_second_step_and_once_on_the_last(context: ForkServerContext, tmp_path: Path) -> None:
    process = start(context, "sft", tmp_path, steps=5)
    process.join(120)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_4", "step_5"]  # keep_last is 2
    assert MetricsLog(tmp_path / "run" / "metrics.jsonl").truncate_after(5) == 0
