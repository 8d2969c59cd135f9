"""A run that loses a worker: from where it goes on, how often, and what it says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trainer.counting import Counting, Events, config, lines, saved
from unirl.distributed.group.launcher import WorkerLostError
from unirl.trainer.base import Interrupted, run


def losing(times: int, also: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Lose a worker as many times, then no more."""
    left = iter(range(times))

    def lose() -> None:
        if next(left, None) is not None:
            also()
            raise WorkerLostError("slab main lost rank 1")

    return lose


def test_it_goes_on_from_its_last_checkpoint_with_the_same_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Counting(config(tmp_path / "whole", 10, save_every=3)).fit()
    trainer = Counting(config(tmp_path / "lossy", 10, save_every=3), Events(in_step={1: losing(1), 7: losing(2)}))
    trainer.fit()
    assert trainer.trained == [0, *range(7), 6, 6, *range(7, 10)]
    assert saved(tmp_path / "lossy") == saved(tmp_path / "whole")
    lossy = lines(tmp_path / "lossy")
    restarts = [line.pop("run/restarts", 0) for line in lossy]
    assert lossy == lines(tmp_path / "whole")
    assert restarts == [0, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3]
    assert "3 restarts replaced lost workers." in (tmp_path / "lossy" / "run" / "report.html").read_text()
    assert [record.getMessage() for record in caplog.records] == [
        "slab main lost rank 1; restart 1 of 3 from step 0",
        "slab main lost rank 1; restart 1 of 3 from step 6",
        "slab main lost rank 1; restart 2 of 3 from step 6",
    ]


def test_a_loss_at_the_start_is_a_loss_like_any_other(tmp_path: Path) -> None:
    trainer = Counting(config(tmp_path, 3), Events(in_setup=losing(2)))
    trainer.fit()
    assert trainer.trained == [0, 1, 2]


@pytest.mark.parametrize("limit", [0, 2])
def test_what_loses_a_worker_each_time_ends_the_run_with_the_cause(
    limit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Counting(config(tmp_path, 9, save_every=3, max_restarts=limit), Events(in_step={5: losing(99)}))
    assert run(trainer) == 1
    assert trainer.trained == [0, 1, 2, *[3, 4] * (limit + 1)]
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: slab main lost rank 1; the run ends here, ")
    assert error.endswith("after 2 restarts from step 3" if limit else "and run.max_restarts is 0")
    assert (tmp_path / "run" / "report.html").exists()


def test_losses_between_other_checkpoints_do_not_add_up(tmp_path: Path) -> None:
    events = Events(in_step={number: losing(2) for number in range(8)})
    trainer = Counting(config(tmp_path, 8, save_every=1, max_restarts=2), events)
    trainer.fit()
    assert trainer.trained == list(range(8))
    assert lines(tmp_path)[-1]["run/restarts"] == 16


def test_a_worker_lost_after_a_stop_request_is_not_replaced(tmp_path: Path) -> None:
    events = Events(in_step={5: losing(1, also=lambda: os.kill(os.getpid(), signal.SIGTERM))})
    with pytest.raises(Interrupted, match=r"slab main lost rank 1, and is not replaced.*Still good: step_4"):
        Counting(config(tmp_path, 9, save_every=2), events).fit()


def test_fewer_restarts_than_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_restarts must not be negative, got -1"):
        config(tmp_path, 9, max_restarts=-1)
