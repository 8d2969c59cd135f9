"""The quickstart on three seeds: what README and the report claim, measured."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_quickstart import interrupted_half
from unirl.observability.metrics import read
from unirl.trainer.base import Interrupted
from unirl.trainer.quickstart import run_quickstart

SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Run:
    """All lines of a run, and those with an evaluation."""

    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read(self.folder / "metrics.jsonl")

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def before(self) -> dict[str, Any]:
        return self._evaluations[0]

    @property
    def after(self) -> dict[str, Any]:
        return self._evaluations[-1]

    @property
    def _evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "eval/reward" in line]

    def rise(self, name: str) -> float:
        return self.after[name] - self.before[name]


@dataclasses.dataclass(frozen=True)
class Learnt:
    """One quickstart: the reinforced digits, both runs of the language half, and what was said."""

    digits: Run
    sort_base: Run
    sort: Run
    said: str


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
        digits, sort_base, sort = (Run(root / str(seed) / name) for name in ("digits/rl", "sort/base", "sort/rl"))
        outcomes[seed] = Learnt(digits, sort_base, sort, said)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_independent_judges_see_the_asked_digit_far_more_often(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed].digits
    assert 0.4 < run.before["eval/knn"] < 0.6
    assert run.rise("eval/knn") >= 0.35
    assert run.rise("eval/forest") >= 0.35


@pytest.mark.slow
def test_on_the_mean_of_three_seeds_nine_of_ten_pictures_show_the_asked_digit(learnt: dict[int, Learnt]) -> None:
    assert sum(run.digits.after["eval/knn"] for run in learnt.values()) / len(SEEDS) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_is_not_hacked(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed].digits
    assert abs(run.after["eval/own"] - run.after["eval/knn"]) <= 0.05
    assert run.after["eval/digits/diversity"] > 0.75 * run.before["eval/digits/diversity"]
    assert run.after["eval/digits/nearest"] < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_before_the_first_update_is_bit_equal_to_the_rollout_in_every_step(
    seed: int, learnt: dict[int, Learnt]
) -> None:
    trained = [line for line in learnt[seed].digits.lines if line["step"] > 0]
    assert len(trained) == 80
    assert all(line["train/rollout_gap_max"] == 0 for line in trained)
    assert max(line["train/ratio_deviation"] for line in trained) > 0.005  # the second update does move
    assert all(math.isfinite(value) for line in trained for name, value in line.items() if not name.startswith("eval/"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_supervision_leaves_the_direction_of_sorting_open(seed: int, learnt: dict[int, Learnt]) -> None:
    run = learnt[seed].sort_base
    assert run.before["eval/exact"] < 0.05
    assert 0.3 < run.after["eval/exact"] < 0.55
    # Of 6 tokens with one bit of direction, ln 2 / 6 = 0.116 nats a token cannot be learnt.
    assert 0.11 < run.after["eval/loss"] < 0.18


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_sorts_held_out_digits_the_rewarded_way(seed: int, learnt: dict[int, Learnt]) -> None:
    base, run = learnt[seed].sort_base, learnt[seed].sort
    assert run.before["eval/exact"] == base.after["eval/exact"]
    assert run.after["eval/exact"] >= 0.75
    assert run.after["step"] == 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_lines_say_what_was_learnt_and_where_the_reports_are(seed: int, learnt: dict[int, Learnt]) -> None:
    digits, sort = learnt[seed].digits, learnt[seed].sort
    for run, name in ((digits, "eval/knn"), (sort, "eval/exact")):
        assert f"{run.before[name]:.3f} -> {run.after[name]:.3f}" in learnt[seed].said
    assert learnt[seed].said.endswith(f"\nReport: {digits.report}\nReport: {sort.report}\n")
    assert "data:image/png;base64," in digits.report.read_text()
    assert "sort 83904:" in sort.report.read_text()


def test_an_interrupted_half_continues_and_a_finished_one_is_not_done_again(tmp_path: Path) -> None:
    half = interrupted_half(tmp_path)
    with pytest.raises(Interrupted, match="saved step 1 of 3"):
        run_quickstart(tmp_path / "runs", 0, [half])
    base, run = Run(tmp_path / "runs" / half.name / "base"), Run(tmp_path / "runs" / half.name / "rl")
    assert [line["step"] for line in run.lines] == [0, 1]
    supervised = base.lines
    said = run_quickstart(tmp_path / "runs", 0, [half])
    reinforced = run.lines
    assert [line["step"] for line in reinforced] == [0, 1, 2, 3]
    assert run_quickstart(tmp_path / "runs", 0, [half]) == said
    assert (base.lines, run.lines) == (supervised, reinforced)
    assert said.splitlines()[1].split()[-3:] == [
        f"{run.before['eval/reward']:.3f}",
        "->",
        f"{run.after['eval/reward']:.3f}",
    ]
