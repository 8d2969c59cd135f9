"""What a picture costs on its way to a reward server of this machine: the same call over HTTP and in the process."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unirl.reward.http.client import Server
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.remote import RemoteScorer

REPEATS = 7


@dataclasses.dataclass(frozen=True)
class MeanLevel(Scorer):
    """The mean level of the picture in [0, 255]: it reads every byte and does next to nothing with it."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float(sample.picture.mean()) for sample in samples]


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Milliseconds for a picture, median of the repeats: in the process, and over HTTP."""

    local: float
    remote: float


def measure_wire(url: str, size: int, count: int) -> WireCost:
    """`count` square pictures of `size` pixels in one call."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(count)]
    samples = [ScorerInput(id=f"r0.p{row}/0", prompt="a picture", image=image) for row, image in enumerate(pictures)]
    remote = RemoteScorer(Server((url,)), "level")
    assert remote.score(samples) == MeanLevel().score(samples)
    return WireCost(_milliseconds(MeanLevel(), samples), _milliseconds(remote, samples))


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of a server in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text("port: 0\nscorers: {level: {scorer: {_target_: benchmarks.reward_wire.MeanLevel}}}\n")
        command = [sys.executable, "-m", "unirl.cli", "serve-reward", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split(" on ")[1].strip()
            finally:
                process.kill()


def _milliseconds(scorer: Scorer, samples: list[ScorerInput]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        scorer.score(samples)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times) / len(samples)
