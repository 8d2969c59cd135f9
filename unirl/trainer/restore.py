"""A finished (or interrupted) run brought back from its folder, or a recipe's model before any training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from unirl.config.error import ConfigError, refusals
from unirl.config.run import load_recipe
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Slab
from unirl.distributed.tensor.plane import resolved
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint import CheckpointStore
from unirl.train.export import refuse_taken
from unirl.trainer.base import spawn_backend
from unirl.trainer.domains import RunnableConfig
from unirl.trainer.sft import SupervisedConfig
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, SamplingParams


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run's configuration, and its weights loaded.

    default_weights: those that its evaluations show
    step:            of the checkpoint; None before any training
    """

    config: RunnableConfig
    slab: Slab
    backend: Handle[FSDPBackend[Any, Any]]
    default_weights: Literal["live", "ema"]
    step: int | None

    def chosen(self, weights: Literal["live", "ema"] | None) -> Literal["live", "ema"]:
        """`weights`; None takes the default. ConfigError where there are none of that kind."""
        if weights == "ema" and self.config.train.backend.ema is None:
            raise ConfigError("this run kept no EMA: its recipe has train.backend.ema=null")
        return self.default_weights if weights is None else weights

    def sampler(self, weights: Literal["live", "ema"] | None, batch_size: int | None = None) -> Handle[TrainsideEngine]:
        """What samples from these weights, `batch_size` samples in a forward."""
        pipeline = ARPipeline if isinstance(self.config.sampling, ARSamplingParams) else DiffusionPipeline
        own = Trainside(batch_size=batch_size, weights=self.chosen(weights))
        return self.slab.spawn(TrainsideEngine, self.backend, own, pipeline)


@contextmanager
def restored(run: Path, step: int | None, overrides: Sequence[str] = ()) -> Iterator[Restored]:
    """The run in folder `run` at checkpoint `step`; None takes the newest complete one. overrides: of its recipe

    A ValueError inside the block leaves it as a ConfigError.
    """
    recipe = run / "config.yaml"
    if not recipe.is_file():
        raise ConfigError(f"{run} is no run: it holds no config.yaml")
    config = load_recipe(str(recipe), overrides)
    store = CheckpointStore(run / "checkpoints", keep_last=1, keep_best=0)
    with refusals(), config.placement.slab() as slab:
        checkpoint = store.latest() if step is None else store.at(step)
        if checkpoint is None:
            raise ConfigError(f"{run} has no complete checkpoint; train it first")
        found = _spawned(config, slab, checkpoint.step)
        found.backend.load(store.load(checkpoint, "cpu", parts=["backend"])["backend"])
        yield found


@contextmanager
def untrained(recipe: str, overrides: Sequence[str] = ()) -> Iterator[Restored]:
    """What training by a recipe would start from. A ValueError inside the block leaves it as a ConfigError."""
    config = load_recipe(recipe, overrides)
    with refusals(), config.placement.slab() as slab:
        yield _spawned(config, slab, None)


def export_run(
    run: Path, folder: Path, *, step: int | None = None, weights: Literal["live", "ema"] | None = None
) -> None:
    """Write the weights of a run as what diffusers, or peft for an adapter, loads back."""
    with refusals():
        refuse_taken(folder)
    with restored(run, step) as found:
        found.backend.export(folder, weights=found.chosen(weights))


def sample_run(
    run: Path,
    prompts: list[str],
    per_prompt: int,
    *,
    seed: int,
    step: int | None = None,
    weights: Literal["live", "ema"] | None = None,
) -> Media:
    """`per_prompt` samples of each prompt from the weights of a run, sampled as in the run (pictures by the ODE)."""
    with restored(run, step) as found:
        filled = found.sampler(weights).generate(_request(prompts, per_prompt, found.config.sampling, seed))
        media = resolved(filled.frontier.media)
    assert media is not None
    return media


def _request(prompts: list[str], per_prompt: int, sampling: SamplingParams, seed: int) -> Sample:
    ids = [root_id(0, row) for row in range(len(prompts))]
    roots = Part(ids=ids, metadata=[{} for _ in ids], media=Media(texts=list(prompts)))
    if isinstance(sampling, DiffusionSamplingParams):
        sampling = sampling.deterministic()
    return Sample((roots,)).fork(per_prompt, dataclasses.replace(sampling, seed=seed))


def _spawned(config: RunnableConfig, slab: Slab, step: int | None) -> Restored:
    backend = spawn_backend(slab, config, config.model, config.train.backend, total_steps=config.run.steps)
    return Restored(config, slab, backend, _default_weights(config), step)


def _default_weights(config: RunnableConfig) -> Literal["live", "ema"]:
    if isinstance(config, SupervisedConfig):
        return config.shown_weights
    return config.rollout.weights
