"""A scorer under another Python: it runs there, comes back when it has ended, and ends with the server."""

from __future__ import annotations

import os
import signal
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.unit.reward.http.level import Process
from tests.unit.reward.http.live import command, remote
from tests.unit.reward.samples import wrote
from unirl.reward.http.config import ServedScorer
from unirl.reward.scorer import Unscored


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that finds the packages of this one."""
    root = tmp_path_factory.mktemp("other")
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in [os.getcwd(), *sys.path] if path))
    return root


def ended(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_it_runs_there_comes_back_and_ends_with_a_server_that_is_killed(other, tmp_path):
    target = "{_target_: tests.unit.reward.http.level.Process}"
    served = f"batch_seconds: 1\nscorers: {{there: {{scorer: {target}, python: {other / 'bin' / 'python'}}}}}"
    with command(tmp_path, served) as (_, url):
        scorer = remote(url, "there", seconds_per_try=60.0, seconds_in_all=60.0, seconds_to_start=60.0)
        first, elsewhere = scorer.score([wrote(str(other)), wrote(sys.prefix)])
        assert first not in (0.0, os.getpid())
        assert elsewhere == 0.0

        os.kill(int(first), signal.SIGKILL)
        (second,) = scorer.score([wrote(str(other))])
        assert second not in (0.0, first)

        blamed, innocent = scorer.score([wrote("end"), wrote(str(other))])
        assert isinstance(blamed, Unscored)
        assert "ended with exit code 3" in blamed.cause
        assert innocent > 0

        blamed, third = scorer.score([wrote("spin"), wrote(str(other))])
        assert isinstance(blamed, Unscored)
        assert "was stuck: " in blamed.cause
        assert "scorer there is at a batch for longer than batch_seconds=1" in blamed.cause
        assert third not in (0.0, innocent)
        assert ended(int(innocent))
    assert ended(int(third))


def test_a_python_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no program"):
        ServedScorer(Process(), python=tmp_path / "python")
