"""What a step costs the driver of many ranks: the real trainers against ranks that only answer.

Every rank has the same load however many there are. Seconds are the CPU seconds of the driver's process without those
of the ranks, which are played in it; the time on the network and in Ray is not in them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from benchmarks.simulated_ranks import Exchange, SimulatedLauncher, pictures, responses, scored, trained
from unirl.config.run import load_recipe
from unirl.data.prompts import PromptRow, PromptSource
from unirl.distributed.group.placement import Slab
from unirl.trainer.domains import trainer_of
from unirl.trainer.rl import DataConfig

SEED = "run.seed=0"
METHODS = ("generate", "score", "train")


@dataclasses.dataclass(frozen=True)
class Load:
    """What each rank does in a step: `prompts` groups of `group` samples. settings: overrides of the recipe"""

    recipe: str
    prompts: int
    group: int
    settings: tuple[str, ...] = ()


# Flow-GRPO's own settings give a GPU 2 groups of 24 pictures. 512 tokens are an answer with its reasons.
PICTURES = Load("diffusion/sd3_flow_grpo", 2, 24, ("reward=jpeg", "train.geometry.micro_batch_size=8"))
TEXTS = Load("ar/sort", 2, 16, ("sampling.max_new_tokens=512",))


@dataclasses.dataclass(frozen=True)
class DriverCost:
    """CPU seconds of one step.

    asking:    prompts, the rows of their samples, and the shards of the request
    gathering: samples from their shards, and shards for the reward
    learning:  scores from their shards, advantages, batch, and shards for the training
    telling:   figures
    packing:   pickling, in all three calls
    bytes:     through the driver in both directions
    """

    asking: float
    gathering: float
    learning: float
    telling: float
    packing: float
    bytes: int

    @property
    def total(self) -> float:
        return self.asking + self.gathering + self.learning + self.telling + self.packing


@dataclasses.dataclass(frozen=True)
class Signs(PromptSource):
    """Prompts that differ, each with an answer."""

    count: int

    def rows(self) -> tuple[PromptRow, ...]:
        return tuple(PromptRow(f"a sign that says number {row}", {"answer": str(row)}) for row in range(self.count))


def measure_driver(load: Load, ranks: int, repeats: int = 3) -> DriverCost:
    """The cheapest of `repeats` steps, after one to warm up."""
    launcher = SimulatedLauncher(ranks, _answers(load))
    trainer = trainer_of(_config(load, ranks))
    trainer.setup(Slab(launcher))
    costs = []
    for number in range(repeats + 1):
        launcher.exchanges.clear()
        began = time.process_time()
        trainer.step(number)
        costs.append(_cost(began, launcher.exchanges, time.process_time()))
    return min(costs[1:], key=lambda cost: cost.total)


def _config(load: Load, ranks: int) -> Any:
    config = load_recipe(load.recipe, [SEED, "eval=null", *load.settings])
    prompts = load.prompts * ranks
    return dataclasses.replace(config, data=DataConfig(Signs(prompts), prompts, load.group))


def _answers(load: Load) -> dict[str, Any]:
    made = pictures if load.recipe.startswith("diffusion/") else responses
    return {"generate": made, "score": scored, "train": trained, "refuse": lambda call: None}


def _cost(began: float, exchanges: list[Exchange], ended: float) -> DriverCost:
    assert tuple(exchange.method for exchange in exchanges) == METHODS
    generate, score, train = exchanges
    return DriverCost(
        asking=generate.entered - began,
        gathering=score.entered - generate.left,
        learning=train.entered - score.left,
        telling=ended - train.left,
        packing=sum(exchange.packing for exchange in exchanges),
        bytes=sum(exchange.sent + exchange.received for exchange in exchanges),
    )


def table(load: Load, ranks: tuple[int, ...]) -> None:
    """A line for each number of ranks."""
    print(
        f"{'ranks':>6} {'samples':>8} {'total':>7} {'asking':>7} {'gather':>7} {'learn':>7} {'tell':>7} {'pack':>7} "
        f"{'MiB':>7} {'KiB/rank':>9}"
    )
    for count in ranks:
        cost = measure_driver(load, count)
        print(
            f"{count:>6} {count * load.prompts * load.group:>8} {cost.total:7.3f} {cost.asking:7.3f} "
            f"{cost.gathering:7.3f} {cost.learning:7.3f} {cost.telling:7.3f} {cost.packing:7.3f} "
            f"{cost.bytes / 2**20:7.1f} {cost.bytes / 2**10 / count:9.1f}",
            flush=True,
        )
