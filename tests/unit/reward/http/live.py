"""A reward server of this process on a free port, and scorers that ask it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.reward.http.client import Server
from unirl.reward.http.config import ServeConfig, ServedScorer
from unirl.reward.http.server import RewardServer, listening_socket
from unirl.reward.scorer import Scorer
from unirl.reward.scorers.remote import RemoteScorer


@contextlib.contextmanager
def live(scorers: Mapping[str, Scorer | ServedScorer], **settings: Any) -> Iterator[str]:
    """The URL of a server of `scorers`."""
    served = {name: one if isinstance(one, ServedScorer) else ServedScorer(one) for name, one in scorers.items()}
    config = ServeConfig(served, port=settings.pop("port", 0), **settings)
    with listening_socket(config) as listener:
        server = RewardServer(config)
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(20)
            assert not thread.is_alive()


@contextlib.contextmanager
def command(folder: Path, served: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`unirl serve-reward` of this YAML in a process of its own, and its URL."""
    (folder / "serve.yaml").write_text(served)
    words = [sys.executable, "-m", "unirl.cli", "serve-reward", str(folder / "serve.yaml"), f"port={port}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split(" on ")[1].strip()
        finally:
            process.kill()


def remote(url: str, scorer: str = "level", version: str | None = None, **settings: Any) -> RemoteScorer:
    fast = {"pause": 0.01, "seconds_per_try": 5.0, "seconds_in_all": 20.0, "seconds_to_start": 5.0, **settings}
    return RemoteScorer(Server((url,), **fast), scorer, version)
