"""The quickstart on three seeds: what README and the report claim, measured."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unirl.observability.metrics import read

SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Learnt:
    """Evaluation before and after, and all lines of the reinforced run."""

    before: dict[str, Any]
    after: dict[str, Any]
    lines: list[dict[str, Any]]
    report: Path
    said: str

    def rise(self, name: str) -> float:
        return self.after[name] - self.before[name]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Learnt]:
    root = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "-m", "unirl.cli", "quickstart"]
    processes = {
        seed: subprocess.Popen(
            [*command, "--output", str(root / str(seed)), "--seed", str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for seed in SEEDS
    }  # fmt: skip
    outcomes = {}
    for seed, process in processes.items():
        said, _ = process.communicate(timeout=1500)
        assert process.returncode == 0
        lines = read(root / str(seed) / "rl" / "metrics.jsonl")
        evaluations = [line for line in lines if "eval/knn" in line]
        report = root / str(seed) / "rl" / "report.html"
        outcomes[seed] = Learnt(evaluations[0], evaluations[-1], lines, report, said)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_independent_judges_see_the_asked_digit_far_more_often(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed]
    assert 0.4 < run.before["eval/knn"] < 0.6
    assert run.rise("eval/knn") >= 0.35
    assert run.rise("eval/forest") >= 0.35


@pytest.mark.slow
def test_on_the_mean_of_three_seeds_nine_of_ten_pictures_show_the_asked_digit(learnt: dict[int, Learnt]) -> None:
    assert sum(run.after["eval/knn"] for run in learnt.values()) / len(SEEDS) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_is_not_hacked(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed]
    assert abs(run.after["eval/own"] - run.after["eval/knn"]) <= 0.05
    assert run.after["eval/digits/diversity"] > 0.75 * run.before["eval/digits/diversity"]
    assert run.after["eval/digits/nearest"] < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_before_the_first_update_is_bit_equal_to_the_rollout_in_every_step(
    seed: int, learnt: dict[int, Learnt]
) -> None:
    trained = [line for line in learnt[seed].lines if line["step"] > 0]
    assert len(trained) == 80
    assert all(line["train/first_ratio_deviation"] == 0 for line in trained)
    assert max(line["train/ratio_deviation"] for line in trained) > 0.005  # the second update does move
    assert all(math.isfinite(value) for line in trained for name, value in line.items() if not name.startswith("eval/"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_lines_say_what_was_learnt_and_where_the_report_is(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed]
    assert f"{run.before['eval/knn']:.3f} -> {run.after['eval/knn']:.3f}" in run.said
    assert run.said.rstrip().endswith(f"Report: {run.report}")
    assert "data:image/png;base64," in run.report.read_text()
