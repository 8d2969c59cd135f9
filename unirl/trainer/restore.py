"""A finished (or interrupted) run brought back from its folder: to export its weights or to sample from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from unirl.config.error import ConfigError, refusals
from unirl.config.run import load_recipe
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import Slab
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
    """A run's configuration, and its weights loaded. default_weights: those that its evaluations show."""

    config: RunnableConfig
    slab: Slab
    backend: Handle[FSDPBackend[Any, Any]]
    default_weights: Literal["live", "ema"]


@contextmanager
def restored(run: Path, step: int | None) -> Iterator[Restored]:
    """The run in folder `run` at checkpoint `step`; None takes the newest complete one.

    A ValueError inside the block leaves it as a ConfigError.
    """
    recipe = run / "config.yaml"
    if not recipe.is_file():
        raise ConfigError(f"{run} is no run: it holds no config.yaml")
    config = load_recipe(str(recipe))
    store = CheckpointStore(run / "checkpoints", keep_last=1, keep_best=0)
    with refusals(), config.placement.slab() as slab:
        checkpoint = store.latest() if step is None else store.at(step)
        if checkpoint is None:
            raise ConfigError(f"{run} has no complete checkpoint; train it first")
        backend = spawn_backend(slab, config, config.model, config.train.backend, total_steps=config.run.steps)
        backend.load(store.load(checkpoint, "cpu", parts=["backend"])["backend"])
        yield Restored(config, slab, backend, _default_weights(config))


def export_run(
    run: Path, folder: Path, *, step: int | None = None, weights: Literal["live", "ema"] | None = None
) -> None:
    """Write the weights of a run as what diffusers, or peft for an adapter, loads back."""
    with refusals():
        refuse_taken(folder)
    with restored(run, step) as found:
        found.backend.export(folder, weights=_chosen(found, weights))


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
        pipeline = ARPipeline if isinstance(found.config.sampling, ARSamplingParams) else DiffusionPipeline
        own = Trainside(weights=_chosen(found, weights))
        engine = found.slab.spawn(TrainsideEngine, found.backend, own, pipeline)
        filled = engine.generate(_request(prompts, per_prompt, found.config.sampling, seed))
    assert filled.frontier.media is not None
    return filled.frontier.media


def _request(prompts: list[str], per_prompt: int, sampling: SamplingParams, seed: int) -> Sample:
    ids = [root_id(0, row) for row in range(len(prompts))]
    roots = Part(ids=ids, metadata=[{} for _ in ids], media=Media(texts=list(prompts)))
    if isinstance(sampling, DiffusionSamplingParams):
        sampling = sampling.deterministic()
    return Sample((roots,)).fork(per_prompt, dataclasses.replace(sampling, seed=seed))


def _chosen(found: Restored, weights: Literal["live", "ema"] | None) -> Literal["live", "ema"]:
    if weights == "ema" and found.config.train.backend.ema is None:
        raise ConfigError("this run kept no EMA: its recipe has train.backend.ema=null")
    return found.default_weights if weights is None else weights


def _default_weights(config: RunnableConfig) -> Literal["live", "ema"]:
    if isinstance(config, SupervisedConfig):
        return config.shown_weights
    return config.rollout.weights
