"""The loop around a step: what is evaluated, logged, saved, resumed and told."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.counting import Counting, Events, config, draws, lines, saved
from unirl.config.error import ConfigError
from unirl.reward.outcome import BrokenScorerError
from unirl.trainer.base import Interrupted, reported, run


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def signals(*numbers: int) -> Callable[[], None]:
    """Send these to this process."""

    def send() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return send


def test_saves_fall_on_multiples_and_once_on_the_last_step_and_no_line_is_missing(tmp_path: Path) -> None:
    trainer = Counting(config(tmp_path, 10, save_every=3, keep_last=9))
    assert trainer.fit() == tmp_path / "run"
    assert trainer.trained == list(range(10))
    assert saved(tmp_path) == [3, 6, 9, 10]
    assert [line["step"] for line in lines(tmp_path)] == list(range(11))
    assert lines(tmp_path)[10] == {"step": 10, "train/total": 55.0}
    assert (tmp_path / "run" / "report.html").exists()


def test_a_failed_run_goes_on_after_its_checkpoint_without_a_gap_or_a_double(tmp_path: Path) -> None:
    common = config(tmp_path, 10, save_every=3, keep_last=9)
    with pytest.raises(RuntimeError, match="power cut"):
        Counting(common, Events(in_step={8: failing(RuntimeError("power cut"))})).fit()
    assert saved(tmp_path) == [3, 6]
    assert [line["step"] for line in lines(tmp_path)] == list(range(9))
    assert "has trained 8 of 10 steps" in (tmp_path / "run" / "report.html").read_text()
    resumed = Counting(common)
    resumed.fit()
    assert resumed.trained == [6, 7, 8, 9]
    assert saved(tmp_path) == [3, 6, 9, 10]
    assert [line["step"] for line in lines(tmp_path)] == list(range(11))
    assert float(resumed.total) == 55.0


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    Counting(config(tmp_path, 4)).fit()
    again = Counting(config(tmp_path, 4))
    again.fit()
    assert again.trained == []
    assert float(again.total) == 10.0


def test_fewer_steps_than_were_trained_are_refused(tmp_path: Path) -> None:
    Counting(config(tmp_path, 4)).fit()
    with pytest.raises(ConfigError, match=r"run\.steps=3: the run has trained 4 steps already"):
        Counting(config(tmp_path, 3)).fit()
    Counting(config(tmp_path, 5)).fit()
    assert saved(tmp_path) == [4, 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_request_finishes_the_step_saves_it_and_the_same_command_goes_on(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    common = config(tmp_path, 5)
    with pytest.raises(Interrupted, match="saved step 2 of 5; the same command continues it"):
        Counting(common, Events(in_step={1: signals(number)})).fit()
    assert signal.getsignal(number) is before
    assert saved(tmp_path) == [2]
    resumed = Counting(common)
    resumed.fit()
    assert resumed.trained == [2, 3, 4]
    assert float(resumed.total) == 15.0


def test_a_stop_request_in_the_set_up_lets_one_step_be_saved(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="saved step 1 of 5"):
        Counting(config(tmp_path, 5), Events(in_setup=signals(signal.SIGTERM))).fit()
    assert saved(tmp_path) == [1]


def test_a_stop_request_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    Counting(config(tmp_path, 3), Events(in_step={2: signals(signal.SIGTERM)})).fit()
    assert saved(tmp_path) == [3]


def test_a_second_request_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Counting(config(tmp_path, 5), Events(in_step={1: signals(signal.SIGINT, signal.SIGINT)})).fit()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_the_best_checkpoint_by_the_metric_stays_beside_the_newest(tmp_path: Path) -> None:
    scores = {0: 9.0, 2: 0.1, 4: 0.8, 6: 0.5, 8: float("nan"), 10: 0.3}
    common = config(tmp_path, 10, save_every=1, keep_last=2, keep_best=1)
    Counting(common, Events(scores=scores)).fit()
    assert saved(tmp_path) == [4, 9, 10]


def test_any_metric_of_the_evaluation_can_choose_the_best(tmp_path: Path) -> None:
    common = config(tmp_path, 3, save_every=1, keep_last=1, keep_best=3, best_metric="eval/noise")
    Counting(common, Events(scores={1: 0.0, 2: 0.0})).fit()
    assert saved(tmp_path) == [1, 2, 3]


def test_evaluations_leave_the_random_streams_of_training_alone_and_draw_the_same_every_time(tmp_path: Path) -> None:
    trained = []
    for name, scores in (("often", dict.fromkeys(range(5), 0.0)), ("never", {})):
        torch.manual_seed(1)
        trainer = Counting(config(tmp_path / name, 4), Events(scores=scores))
        first = draws()
        trainer.fit()
        trained.append([draw[0] for draw in trainer.drawn])
    assert trained[0] == trained[1]
    assert first[0] not in trained[0]
    noises = {line["eval/noise"] for line in lines(tmp_path / "often")}
    assert len(noises) == 1
    assert not noises & set(trained[0])


def test_an_evaluation_comes_before_training_and_its_figures_stand_in_the_line_of_its_step(tmp_path: Path) -> None:
    Counting(config(tmp_path, 3), Events(scores={0: 0.25, 3: 0.75})).fit()
    assert [line["eval/reward"] for line in lines(tmp_path) if "eval/reward" in line] == [0.25, 0.75]
    assert "train/total" not in lines(tmp_path)[0]
    assert lines(tmp_path)[3]["train/total"] == 6.0


def test_what_a_worker_refuses_in_the_set_up_is_a_mistake_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such layer"):
        Counting(config(tmp_path, 3), Events(in_setup=failing(ValueError("no such layer")))).fit()


def test_an_error_of_the_disk_says_what_is_still_good(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    with pytest.raises(OSError, match=r"metrics\.jsonl: No space left on device\. Still good: step_2, where the same"):
        Counting(config(tmp_path, 5, save_every=2), Events(in_step={3: failing(full)})).fit()
    with pytest.raises(OSError, match=r"No space left on device\. There is no earlier checkpoint"):
        Counting(config(tmp_path / "other", 5), Events(in_step={0: failing(full)})).fit()


def test_a_report_that_cannot_be_written_does_not_hide_what_stopped_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = Counting(config(tmp_path, 1)).fit() / "report.html"
    report.unlink()
    report.mkdir()
    with pytest.raises(RuntimeError, match="the cause"):
        Counting(config(tmp_path, 3), Events(in_step={1: failing(RuntimeError("the cause"))})).fit()
    assert f"the report of {tmp_path}/run could not be written" in caplog.text
    with pytest.raises(OSError, match=r"report\.html"):
        Counting(config(tmp_path, 2)).fit()


@pytest.mark.parametrize("content", ["", "[1]", "run: ["])
def test_a_folder_whose_recipe_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    recipe = Counting(config(tmp_path, 1)).fit() / "config.yaml"
    recipe.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml (holds no recipe|cannot be read).*choose another run\.name"):
        Counting(config(tmp_path, 1)).fit()


def test_a_second_run_in_the_folder_of_one_that_trains_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    def begin_another() -> None:
        before = (tmp_path / "run" / "run.json").read_bytes()
        with pytest.raises(ConfigError, match="another program trains in this folder"):
            Counting(config(tmp_path, 9)).fit()
        refused.append("while the first one is at step 1")
        assert (tmp_path / "run" / "run.json").read_bytes() == before

    first = Counting(config(tmp_path, 3), Events(in_step={1: begin_another}))
    first.fit()
    assert (first.trained, len(refused)) == ([0, 1, 2], 1)
    resumed = Counting(config(tmp_path, 4))
    resumed.fit()
    assert resumed.trained == [3]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (Interrupted("saved step 2 of 5"), 130, "saved step 2 of 5\n"),
        (KeyboardInterrupt(), 130, "stopped at once; the same command continues from the last checkpoint\n"),
        (ConfigError("run.step: unknown", "run.x: wrong"), 2, "error: run.step: unknown\nerror: run.x: wrong\n"),
        (OSError(errno.EACCES, "Permission denied", "runs"), 1, "error: runs: Permission denied\n"),
        (OSError(errno.EFBIG, "could not save x"), 1, "error: could not save x\n"),
        (OSError("no connection to the hub"), 1, "error: no connection to the hub\n"),
        (FloatingPointError("not finite"), 1, "error: not finite\n"),
        (BrokenScorerError("scorer mine returned NoneType"), 1, "error: scorer mine returned NoneType\n"),
    ],
)
def test_what_a_user_can_mend_ends_in_a_line_and_an_exit_code(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> str:
        raise error

    assert reported(work) == code
    assert capsys.readouterr() == ("", told)


def test_what_only_we_can_get_wrong_keeps_its_traceback() -> None:
    def work() -> str:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        reported(work)


def test_a_run_that_ends_tells_where_its_report_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Counting(config(tmp_path, 1))) == 0
    assert capsys.readouterr().out == f"report: {tmp_path}/run/report.html\n"
