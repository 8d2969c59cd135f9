"""Trainside: the training module is the sampler. No second copy of the weights, nothing to publish."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, Protocol, TypeVar

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.models.policy import Policy
from unirl.rollout.base import RolloutEngine
from unirl.types.media import Media
from unirl.types.sample import Sample
from unirl.types.sampling import SamplingParams

Stage = TypeVar("Stage")


@dataclasses.dataclass(frozen=True)
class Trainside:
    """batch_size: samples in one forward; None takes a whole rollout
    weights:    which weights sample: the live ones, or their EMA (DiffusionNFT)
    """

    batch_size: int | None = None
    weights: Literal["live", "ema"] = "live"

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"rollout.batch_size must be at least 1 or null, got {self.batch_size}")


class Pipeline(Protocol):
    """Fills the frontier of a Sample; `version` names the weights that do it."""

    def __call__(self, sample: Sample, *, version: int) -> Sample: ...

    def refuse(self, prompts: Media, sampling: Any) -> None: ...


class TrainsideEngine(Remote, RolloutEngine):
    """Samples with the policy that its siblings train. pipeline: of the policy's kind of stage, and the batch size."""

    def __init__(
        self, policy: Policy[Stage], config: Trainside, pipeline: Callable[[Stage, int | None], Pipeline]
    ) -> None:
        self._policy, self._config = policy, config
        self._pipeline = pipeline(policy.stage, config.batch_size)

    @remote(Dispatch.DP_COLLECTIVE, reads=("media",))
    def generate(self, sample: Sample | None) -> Sample | None:
        """With whole weights on every rank: one is done when its own rows are, whatever the others write."""
        with self._policy.ema() if self._config.weights == "ema" else nullcontext(), self._policy.gathered():
            return None if sample is None else self._pipeline(sample, version=self._policy.version)

    @remote(Dispatch.RANK_ZERO)
    def refuse(self, prompts: Media, sampling: SamplingParams) -> None:
        """ValueError for prompts that the model cannot take, known without generating anything."""
        self._pipeline.refuse(prompts, sampling)
