"""Files and folders that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.observability.atomic import first_wins, replace_file


def test_the_file_holds_exactly_the_bytes_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    replace_file(path, b"one\r\n\0")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.mkdir()
    (path / "inside").write_text("old")
    with pytest.raises(OSError, match="kept"):
        replace_file(path, b"new")
    assert (path / "inside").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_folder_of_a_cache_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    with pytest.raises(ValueError, match="half way"), first_wins(folder) as whole:  # noqa: PT012 - it fails in the block
        whole.mkdir()
        (whole / "a").write_text("half")
        raise ValueError("half way")
    assert list(folder.parent.iterdir()) == []
    with first_wins(folder) as whole:
        whole.mkdir()
        (whole / "a").write_text("all")
    assert [entry.name for entry in folder.parent.iterdir()] == ["model"]
    assert (folder / "a").read_text() == "all"


def test_of_two_that_write_a_folder_the_first_one_stays(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with first_wins(folder) as late:
        late.mkdir()
        (late / "a").write_text("late")
        with first_wins(folder) as early:
            early.mkdir()
            (early / "a").write_text("early")
    assert (folder / "a").read_text() == "early"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
