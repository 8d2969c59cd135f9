"""A scorer under another Python, whose packages do not go with ours: a server of its own, which this one asks.

    this server -> loopback -> `python -m unirl.reward.http.other_python CONFIG` under that Python -> the scorer

It is started again where it has ended or is stuck. It ends with this process, whatever that ends by: its standard input
closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import httpx

from unirl.reward.http.client import Server
from unirl.reward.scorer import Scorer, ScorerInput, Unscored

_START_SECONDS = 600.0  # for imports and models
_CALL_SECONDS = 3600.0
_END_SECONDS = 10.0
_LINGER_SECONDS = 0.2  # a connection breaks a moment before the process is gone


class OtherPython(Scorer):
    """`served` is the plain data of the scorer's section in a server's file; batch_seconds: as of that server"""

    def __init__(self, name: str, python: Path, served: dict[str, Any], batch_seconds: float) -> None:
        self._name, self._python = name, python
        self._served = {"scorers": {name: served}, "port": 0, "batch_seconds": batch_seconds}
        self._running: _Running | None = None

    @property
    def version(self) -> str:
        return self._alive().version

    def prepare(self) -> None:
        self._alive()

    def score(self, samples: list[ScorerInput]) -> list[float]:
        """RuntimeError where the process ends twice or is stuck: with a batch halved, the one to blame stands alone."""
        for _ in range(2):
            running = self._alive()
            scores = running.server.scores(self._name, running.version, samples)
            failed = next((score for score in scores if isinstance(score, Unscored)), None)
            if failed is None:
                return scores
            if running.exit_code(_LINGER_SECONDS) is None:
                if not running.is_stuck():
                    return scores
                self.close()
                raise RuntimeError(f"the process under {self._python} was stuck: {failed.cause}")
        raise RuntimeError(f"the process under {self._python} ended with exit code {running.exit_code()}")

    def close(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _alive(self) -> _Running:
        if self._running is None or self._running.exit_code() is not None:
            self.close()
            self._running = _Running(self._name, self._python, self._served)
        return self._running


class _Running:
    """The process, its server and the version that it serves."""

    def __init__(self, name: str, python: Path, served: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "serve.yaml"
            config.write_text(json.dumps(served))  # JSON is YAML
            command = [str(python), "-m", "unirl.reward.http.other_python", str(config)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.stop = weakref.finalize(self, _end, process)
            url = _first_line(process).rpartition(" on ")[2].strip()
        if not url.startswith("http://"):
            self.stop()
            raise RuntimeError(f"scorer {name} does not start under {python}: exit code {process.returncode}")
        self._process, self._url = process, url
        self.server = Server(
            (url,), tries=2, pause=0.1, seconds_per_try=_CALL_SECONDS, seconds_in_all=_CALL_SECONDS,
            seconds_to_start=_START_SECONDS,
        )  # fmt: skip
        try:
            self.version = self.server.version(name)
        except ValueError as error:
            self.stop()
            raise RuntimeError(f"scorer {name} does not load under {python}: {error}") from error

    def is_stuck(self) -> bool:
        """Whether it is not ready any more, or does not even say so."""
        try:
            return httpx.get(f"{self._url}/readyz", timeout=_END_SECONDS, trust_env=False).is_error
        except httpx.HTTPError:
            return True

    def exit_code(self, wait: float = 0.0) -> int | None:
        """None while it runs, and still does after `wait` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait)
        return None


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """What it prints when it listens; nothing where it ends before, or is not there in time."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + _START_SECONDS
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(process.stdout.fileno(), 1) if readable else b""
        if not byte:
            return ""
        line += byte
    return line.decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = ["unirl", "serve-reward", sys.argv[1]]
    runpy.run_module("unirl.cli", run_name="__main__")
