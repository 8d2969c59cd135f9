"""`python -m benchmarks.run`: every benchmark as a table; each side of a row runs in a process of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from pathlib import Path
from typing import Literal

from benchmarks.bare_loop import Workload
from benchmarks.diffusion_step import Cost, measure
from unirl.models.random_weights.sd3 import write as write_sd3

REPEATS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_sd3(Path(folder) / "sd3", layers=4, width=128, head_dim=64)
        both = Workload()
        print("One Flow-GRPO step of an SD3 of 2.3M weights, LoRA r32, one thread: CPU seconds and peak memory (MiB)")
        print(f"{'workload':<46} {'ours':>6} {'bare':>6} {'ratio':>6} {'outside model':>14} {'ours':>6} {'bare':>6}")
        row("16 x 10, 9 trained, guidance 4.5, no gradient", checkpoint, both)
        row("16 x 10, 9 trained, guidance 4.5, gradient", checkpoint, dataclasses.replace(both, guidance_gradient=True))
        small = dataclasses.replace(both, guidance=1.0, trained=3)
        row("16 x 10, 3 trained, guidance 1", checkpoint, small)
        for group, steps in ((4, 10), (16, 10), (8, 20)):
            grown = dataclasses.replace(small, group=group, steps=steps)
            row(f"{2 * group} x {steps}, 3 trained, guidance 1", checkpoint, grown)


def row(name: str, checkpoint: Path, work: Workload) -> None:
    """Measure one workload and print its line."""
    ours, bare = (in_process(side, checkpoint, work) for side in ("product", "bare"))
    print(
        f"{name:<46} {ours.total:6.2f} {bare.total:6.2f} {ours.total / bare.total:6.2f} {ours.overhead:14.1%}"
        f" {ours.peak_mib:6.0f} {bare.peak_mib:6.0f}",
        flush=True,
    )


def in_process(side: Literal["product", "bare"], checkpoint: Path, work: Workload) -> Cost:
    """A process of its own: the peak of its memory is the peak of this workload."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (side, checkpoint, work, REPEATS))


if __name__ == "__main__":
    main()
