"""Files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.observability.atomic import replace_file


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
