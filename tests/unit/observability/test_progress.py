"""The progress line, on a real terminal and elsewhere."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import struct
import termios

from unirl.observability.progress import ProgressLine, format_evaluation, format_step

STEP = {
    "reward/mean": 0.71349,
    "train/kl": 0.00213,
    "train/loss": 0.5,
    "train/ratio_deviation": 0.1,
    "train/clip_fraction": 0.375,
    "train/skipped": 0.0,
    "seconds/rollout": 0.07,
    "seconds/train": 0.18,
    "seconds/step": 0.26,
}
LINE = (
    "step  3/80 | 0:21 left | reward 0.713 | kl 0.00213 | |ratio-1| 0.1 | clipped 0.375 | "
    "s: rollout 0.07 train 0.18 step 0.26"
)


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    progress = ProgressLine(80, stream)
    progress.update(3, STEP, 21.4)
    progress.update(4, {"train/loss": 0.25})
    progress.close()
    assert stream.getvalue() == f"{LINE}\nstep  4/80 | loss 0.25\n"


def test_figures_that_are_missing_are_left_out() -> None:
    assert format_step(0, 5, {}, None) == ["step 0/5"]
    assert format_step(1, 5, {"train/kl": math.nan}, 3) == ["step 1/5", "0:03 left", "kl nan"]


def test_trouble_is_told_when_there_is_any() -> None:
    fields = format_step(1, 5, {"train/skipped": 1.0, "reward/invalid": 3.0, "reward/mean": 1.0}, None)
    assert fields == ["step 1/5", "SKIPPED 1", "INVALID 3", "reward 1"]


def test_evaluations_get_a_line_that_stays() -> None:
    metrics = {"eval/knn": 0.476, "eval/svm": 0.48}
    assert format_evaluation(0, metrics) == "evaluation at step 0: knn 0.476  svm 0.480"
    assert format_evaluation(0, STEP) == ""
    stream = io.StringIO()
    ProgressLine(8, stream).update(0, metrics)
    assert stream.getvalue() == "evaluation at step 0: knn 0.476  svm 0.480\nstep 0/8\n"


def on_terminal(columns: int) -> str:
    """What two steps, a note between them and the end write to a terminal of that width."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(writer, "w") as stream:
        progress = ProgressLine(80, stream)
        progress.update(3, STEP, 21.4)
        progress.note("saved step_3")
        progress.update(4, {"reward/mean": 0.75})
        progress.close()
        # The mark tells where to stop: a terminal hands its bytes out in pieces.
        stream.write("\0")
        stream.flush()
        written = b""
        while not written.endswith(b"\0"):
            written += os.read(reader, 4096)
    os.close(reader)
    return written.decode().removesuffix("\0")


def test_a_terminal_has_its_line_rewritten_in_place() -> None:
    assert on_terminal(200) == (f"\r{LINE}\x1b[K\r\x1b[Ksaved step_3\r\n\rstep  4/80 | reward 0.75\x1b[K\r\n")


def test_a_narrow_terminal_gets_whole_fields_that_fit() -> None:
    fitting = "step  3/80 | 0:21 left | reward 0.713 | kl 0.00213"
    first, _, _ = on_terminal(len(fitting) + 1).partition("\x1b[K")
    assert first == f"\r{fitting}"
    shorter, _, _ = on_terminal(len(fitting)).partition("\x1b[K")
    assert shorter == "\rstep  3/80 | 0:21 left | reward 0.713"
    assert on_terminal(6).startswith("\rstep \x1b[K")


def test_a_log_file_gets_a_line_every_few_seconds_and_always_the_last_step_and_evaluations() -> None:
    stream = io.StringIO()
    progress = ProgressLine(100, stream, plain_seconds=3600)
    for step in range(1, 101):
        progress.update(step, {"train/loss": 1.0, **({"eval/knn": 0.5} if step == 50 else {})})
    told = [line.split("/")[0].split()[-1] for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert told == ["1", "50", "100"]
