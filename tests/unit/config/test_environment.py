from __future__ import annotations

import os
from pathlib import Path

import pytest

from unirl.config import environment


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver's device file is the path that is returned; no variable is set."""
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_DRIVERS", (tmp_path / "nvidiactl",))
    return tmp_path / "nvidiactl"


def test_a_cpu_machine_gets_one_sleeping_thread_per_worker(drivers: Path) -> None:
    environment.set_environment()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")


def test_what_the_user_set_stays(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    environment.set_environment()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("6", "PASSIVE")


def test_a_machine_with_an_accelerator_is_left_alone(drivers: Path) -> None:
    drivers.touch()
    environment.set_environment()
    assert "OMP_NUM_THREADS" not in os.environ
    assert environment.has_accelerator()


@pytest.mark.parametrize(("visible", "seen"), [("", False), ("-1", False), ("0", True), ("0,1", True)])
def test_hidden_devices_do_not_count(drivers: Path, monkeypatch: pytest.MonkeyPatch, visible: str, seen: bool) -> None:
    drivers.touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.has_accelerator() is seen


def test_the_cache_lies_where_the_user_says_and_otherwise_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, folder in ((str(tmp_path / "named"), tmp_path / "named"), ("", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert environment.cache_folder() == folder / "unirl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environment.cache_folder() == tmp_path / "home" / ".cache" / "unirl"
