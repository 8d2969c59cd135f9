"""One line that tells how a run is doing."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from unirl.observability.formatting import duration, figure
from unirl.observability.metrics import SECONDS

# The figures of a step in the order of the line, and what they are called there.
_FIGURES = {
    "reward/mean": "reward",
    "rollout/tokens": "tokens",
    "train/entropy": "entropy",
    "train/kl": "kl",
    "train/ratio_deviation": "|ratio-1|",
    "train/clip_fraction": "clipped",
}
_ALARMS = {"train/skipped": "SKIPPED", "reward/invalid": "INVALID"}
_EVAL = "eval/"


class ProgressLine:
    """Rewrites its line in place on a terminal; writes plain lines into anything else (a file, a pipe).

    plain_seconds: at least so long between two plain lines; the last step and evaluations are always told
    """

    def __init__(self, steps: int, stream: TextIO = sys.stderr, *, plain_seconds: float = 0.0) -> None:
        self._steps = steps
        self._stream = stream
        self._plain_seconds, self._plain_at = plain_seconds, -math.inf
        self._in_place = stream.isatty()
        self._unfinished = False

    def update(self, step: int, metrics: Mapping[str, float], left: float | None = None) -> None:
        """Tell step `step` of `steps` by its metrics, with `left` seconds to go. Evaluations get a line that stays."""
        evaluation = format_evaluation(step, metrics)
        if evaluation:
            self.note(evaluation)
        fields = format_step(step, self._steps, metrics, left)
        if not self._in_place:
            now = time.monotonic()
            if now - self._plain_at >= self._plain_seconds or step == self._steps or evaluation:
                self._plain_at = now
                self._write(" | ".join(fields) + "\n")
            return
        self._write("\r" + self._fit(fields) + "\x1b[K")
        self._unfinished = True

    def note(self, text: str) -> None:
        """A line of its own, above the progress line."""
        self._write(f"\r\x1b[K{text}\n" if self._unfinished else f"{text}\n")
        self._unfinished = False

    def close(self) -> None:
        """Leave the last line standing."""
        if self._unfinished:
            self._write("\n")
        self._unfinished = False

    def _fit(self, fields: list[str]) -> str:
        # A line that wraps cannot be rewritten: whole fields are dropped from the end, the first one is cut.
        # The last column stays empty, since some terminals wrap as soon as it is filled.
        width = os.get_terminal_size(self._stream.fileno()).columns - 1
        line = fields[0]
        for field in fields[1:]:
            if width > 0 and len(line) + len(field) + 3 > width:
                break
            line = f"{line} | {field}"
        return line[:width] if width > 0 else line

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def format_step(step: int, steps: int, metrics: Mapping[str, float], left: float | None) -> list[str]:
    """The fields of the progress line, most wanted first; figures that are not there are left out."""
    fields = [f"step {step:>{len(str(steps))}}/{steps}"]
    if left is not None:
        fields.append(f"{duration(left)} left")
    fields += [f"{label} {metrics[name]:.0f}" for name, label in _ALARMS.items() if metrics.get(name, 0) > 0]
    if "reward/mean" not in metrics and "train/loss" in metrics:
        fields.append(f"loss {_short(metrics['train/loss'])}")
    fields += [f"{label} {_short(metrics[name])}" for name, label in _FIGURES.items() if name in metrics]
    phases = [name for name in metrics if name.startswith(SECONDS) and name != f"{SECONDS}step"]
    seconds = [f"{name.removeprefix(SECONDS)} {metrics[name]:.2f}" for name in phases]
    if f"{SECONDS}step" in metrics:
        seconds.append(f"step {metrics[f'{SECONDS}step']:.2f}")
    if seconds:
        fields.append(f"s: {' '.join(seconds)}")
    return fields


def format_evaluation(step: int, metrics: Mapping[str, float]) -> str:
    """The evaluation figures of a step as one line, or "" where there are none."""
    names = [name for name in metrics if name.startswith(_EVAL)]
    figures = "  ".join(f"{name.removeprefix(_EVAL)} {figure(metrics[name])}" for name in names)
    return f"evaluation at step {step}: {figures}" if figures else ""


def _short(value: float) -> str:
    return f"{value:.3g}"
