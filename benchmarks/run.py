"""`python -m benchmarks.run`: every benchmark, as one table each. Ratios are within this run."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch

from benchmarks.bare_loop import Workload
from benchmarks.diffusion_step import measure
from tests.tiny_sd3 import write_pipeline


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_pipeline(Path(folder) / "sd3", with_t5=True, layers=4, width=128, head_dim=64)
        print("One Flow-GRPO step of a 2.3M SD3, 16 samples x 10 steps, LoRA r32, one thread (CPU seconds)")
        print(f"{'workload':<44} {'ours':>7} {'bare':>7} {'ratio':>6} {'outside the model':>18}")
        both = Workload()
        row("9 trained steps, guidance 4.5, no gradient", checkpoint, both)
        row("9 trained steps, guidance 4.5, gradient", checkpoint, dataclasses.replace(both, guidance_gradient=True))
        row("3 trained steps, guidance 1", checkpoint, dataclasses.replace(both, guidance=1.0, trained=3))
        print("\nGrowth (guidance 1, 3 trained steps)")
        small = dataclasses.replace(both, guidance=1.0, trained=3)
        for group, steps in ((4, 10), (8, 10), (16, 10), (8, 20)):
            name = f"{2 * group} samples x {steps} steps"
            row(name, checkpoint, dataclasses.replace(small, group=group, steps=steps))


def row(name: str, checkpoint: Path, work: Workload) -> None:
    """Measure one workload and print its line."""
    ours, bare = measure(checkpoint, work)
    print(
        f"{name:<44} {ours.total:7.2f} {bare.total:7.2f} {ours.total / bare.total:6.2f} {ours.overhead:17.1%}"
        f"   peak {ours.peak_mib:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
