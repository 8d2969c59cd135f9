"""Saves of a loop: one at a time, visible at a boundary, and what fails is told."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.counting import Counting, Events, config, saved
from unirl.train.checkpoint import RankPart
from unirl.train.stored_file import StoredFile, write_value

FULL = OSError(errno.ENOSPC, "No space left on device")


class Slow(RankPart):
    """Writes for as many looks at it as `looks`; `failure` ends the write of that step."""

    def __init__(self, looks: int, failing_step: int | None = None) -> None:
        self.looks, self.failing_step = looks, failing_step
        self.told: list[str] = []
        self.left, self.step = 0, ""
        self.files: dict[str, StoredFile] = {}

    def write(self, folder: Path, *, background: bool) -> None:
        assert not self.files, "two at once"
        self.step = folder.parent.name.removeprefix(".partial-step_")
        self.left = self.looks if background else 0
        self.files = {"w.pt": write_value(folder / "w.pt", int(self.step))}
        self.told.append(f"{self.step} {'beside' if background else 'waiting'}")

    def writing(self) -> bool:
        self.left -= 1
        return self.left > 0

    def written(self) -> dict[str, StoredFile]:
        files, self.files = self.files, {}
        self.told.append(f"{self.step} done")
        if self.step == str(self.failing_step):
            raise FULL
        return files


class Sharded(Counting):
    """Counting, with a part that is written slowly."""

    def __init__(self, common: Any, part: Slow, events: Events | None = None) -> None:
        super().__init__(common, events)
        self.part = part

    def state(self) -> dict[str, Any]:
        return {**super().state(), "backend": self.part}


def test_a_save_is_made_visible_at_the_first_boundary_after_its_files_are_written(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}
    folder = tmp_path / "run" / "checkpoints"

    def look(number: int) -> None:
        seen[number] = sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))

    events = Events(in_step={number: lambda number=number: look(number) for number in range(2, 6)})
    part = Slow(looks=3)
    Sharded(config(tmp_path, 6, save_every=2, keep_last=9), part, events).fit()
    assert part.told == ["2 beside", "2 done", "4 beside", "4 done", "6 waiting", "6 done"]
    assert seen == {2: [], 3: [], 4: [2], 5: [2]}
    assert saved(tmp_path) == [2, 4, 6]


def test_without_async_save_every_save_is_waited_for(tmp_path: Path) -> None:
    part = Slow(looks=100)
    Sharded(config(tmp_path, 4, save_every=2, keep_last=9, async_save=False), part).fit()
    assert part.told == ["2 waiting", "2 done", "4 waiting", "4 done"]


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    part = Slow(looks=100)
    Sharded(config(tmp_path, 5, save_every=2, keep_last=9), part).fit()
    assert part.told == ["2 beside", "2 done", "4 beside", "4 done", "5 waiting", "5 done"]
    assert saved(tmp_path) == [2, 4, 5]


def test_a_failure_beside_the_training_stops_it_at_a_boundary_with_what_is_still_good(tmp_path: Path) -> None:
    trainer = Sharded(config(tmp_path, 9, save_every=2, keep_last=9), Slow(looks=2, failing_step=4))
    with pytest.raises(OSError, match=r"could not save .*step_4: No space left on device\. Still good: step_2"):
        trainer.fit()
    assert trainer.trained == [0, 1, 2, 3, 4]
    assert saved(tmp_path) == [2]


def test_a_failing_step_still_lets_the_save_under_way_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("power cut")

    for failing_step, there in ((None, [2]), (2, [])):
        output = tmp_path / str(failing_step)
        part = Slow(looks=100, failing_step=failing_step)
        with pytest.raises(RuntimeError, match="power cut"):
            Sharded(config(output, 9, save_every=2), part, Events(in_step={2: fail})).fit()
        assert part.told == ["2 beside", "2 done"]
        assert saved(output) == there
    assert "the checkpoint that was being written is lost: [Errno 28] could not save" in caplog.text
