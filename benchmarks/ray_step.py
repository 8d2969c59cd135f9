"""What Ray adds to a step: one trainer, recipe and seed in this process, and on ranks of a cluster of this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from unirl.config.run import load_recipe
from unirl.distributed.group.placement import Placement
from unirl.trainer.diffusion import DiffusionTrainer

RECIPE = "diffusion/digits"
SETTINGS = ("run.seed=0", "eval=null", "reward=jpeg")


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, the quickest: in this process, on one rank, on two."""

    local: float
    one: float
    two: float


def measure_ray_step(repeats: int, settings: Sequence[str] = ()) -> StepTimes:
    """Of `repeats` steps after one to warm up; `settings` are overrides of the recipe."""
    cluster = Placement(launcher="ray", device="cpu", devices=1)
    placements = (Placement(device="cpu"), cluster, dataclasses.replace(cluster, devices=2))
    return StepTimes(*(_quickest(placement, repeats, settings) for placement in placements))


def _quickest(placement: Placement, repeats: int, settings: Sequence[str]) -> float:
    config = load_recipe(RECIPE, [*SETTINGS, *settings])
    assert config.domain == "diffusion"
    trainer, seconds = DiffusionTrainer(config), []
    with placement.slab() as slab:
        trainer.setup(slab)
        for number in range(repeats + 1):
            began = time.perf_counter()
            trainer.step(number)
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
