"""`metrics.jsonl`: one line a step, the numbers every other view is drawn from.

    {"step": 0, "eval/svm": 0.478}
    {"step": 1, "reward/mean": 0.51, "reward/std": 0.31, "seconds/step": 0.26, "train/kl": 0.0004}

A line is standard JSON with `step` first and the names sorted. Floats are written with the fewest digits that read back
to the same bits. JSON has no NaN and no infinity: NaN is null, the infinities are the strings "Infinity" and
"-Infinity"; `read` gives the floats back. All times are under `seconds/`: the rest of a line is the same in a repeated
run, but for `run/restarts`.
"""

from __future__ import annotations

import json
import math
import operator
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.observability.atomic import naming, replace_file

SECONDS = "seconds/"
_SECONDS_BETWEEN_SYNCS = 1.0


class MetricsLog:
    """Appends to one `metrics.jsonl`. A line that `append` has returned from survives a kill; `sync` makes all of them
    survive a power cut, and is called before a checkpoint that builds on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced = -math.inf
        lines = read(path)
        self._last_step: int | None = lines[-1]["step"] if lines else None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of `step`, which must come after every step in the file."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path} already holds step {self._last_step}, so step {step} cannot follow; "
                f"on resume call truncate_after with the step of the checkpoint"
            )
        if "step" in metrics:
            raise ValueError(f"'step' is the key of the line itself and cannot name a metric, got {metrics['step']}")
        values = {name: _encode(metrics[name]) for name in sorted(metrics)}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), self.path.open("ab") as file:
            assert _is_whole(self.path), f"{self.path} ends in a torn line: truncate_after was not called on resume"
            file.write(line.encode())
        self._last_step = step
        # A sync takes milliseconds, a tenth of a small model's step: once a second is what a power cut may cost.
        if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
            self.sync()

    def sync(self) -> None:
        """Wait until every line is on the disk."""
        if self.path.exists():
            with naming(self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())
        self._synced = time.monotonic()

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step`, and a last line torn by a kill. Returns how many lines went."""
        if not self.path.exists():
            return 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for row, line in enumerate(lines) if _whole(line) and _parse(self.path, row, line)["step"] <= step]
        if len(kept) < len(lines):
            replace_file(self.path, b"".join(kept))
        self._last_step = _parse(self.path, len(kept) - 1, kept[-1])["step"] if kept else None
        return len(lines) - len(kept)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of `path` in order, `step` an int and every other value a float; no file is no line.

    A last line without its line break is one that is being written, or was torn by a kill: it is left out.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [_parse(path, row, line) for row, line in enumerate(lines) if _whole(line)]


def _encode(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _parse(path: Path, row: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
        step = operator.index(values.pop("step"))
        return {"step": step, **{name: math.nan if v is None else float(v) for name, v in values.items()}}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}:{row + 1} is no line of metrics: {line[:80]!r}") from error


def _whole(line: bytes) -> bool:
    return line.endswith(b"\n")


def _is_whole(path: Path) -> bool:
    size = path.stat().st_size
    if size == 0:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return _whole(file.read(1))
