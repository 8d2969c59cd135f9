"""A language policy that trains in milliseconds: TinyLM at its smallest in the backend, engine and stack of all.

What does not depend on the kind of policy (`context`, `last_gradient`, `saved` ...) is in tests/tiny_policy.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from tests.tiny_policy import PLAIN, START
from unirl.algorithms.base import Progress
from unirl.algorithms.token_base import TokenAlgorithm
from unirl.data.prompts import PromptRow, as_roots
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import LanguageFamily
from unirl.models.tiny_language import TinyLM
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, TokenGeometry
from unirl.types.metric import Metrics
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

CHARACTERS = "0123456789ab"
SMALL_LM = TinyLM(layers=1, width=16, heads=2, characters=CHARACTERS, context=32)
# Two of thirteen tokens end a response, so that lengths differ.
WRITING = ARSamplingParams(max_new_tokens=8, stop_token_ids=(CHARACTERS.index("b"),), seed=3)


def language_policy(
    family: LanguageFamily = SMALL_LM, *, reference: bool = False, total_steps: int = 100, **settings: Any
) -> FSDPBackend:
    """A backend on the CPU that does not clip; `settings` are those of ARBackendConfig."""
    config = ARBackendConfig(**{"optimizer": PLAIN, "max_grad_norm": None, **settings})
    return FSDPBackend(
        family, config, device=torch.device("cpu"), seed=0, total_steps=total_steps, with_reference=reference
    )


def written(
    backend: FSDPBackend,
    *,
    number: int = 0,
    prompts: Sequence[str] = ("12", "3a0"),
    group: int = 2,
    engine: Trainside | None = None,
    **sampling: Any,
) -> Part:
    """`group` responses of up to 8 tokens to each prompt unless `sampling` says otherwise, without rewards."""
    roots = as_roots([PromptRow(prompt) for prompt in prompts], number)
    request = Sample((roots,)).fork(group, dataclasses.replace(WRITING, **sampling))
    filled = TrainsideEngine(backend, engine or Trainside(), ARPipeline).generate(request)
    assert filled is not None
    return filled.frontier


def scored(part: Part, rewards: Sequence[float], *, scale: Literal["group_std", "none"] = "none") -> Part:
    """`part` with rewards and advantages relative to the group."""
    total = torch.tensor(list(rewards), dtype=torch.float32)
    return part.with_rewards(Scores(total, {}, [()] * len(part))).compute_advantages("group", scale)


def text(part: Part) -> TextSegment:
    """What the rollout recorded."""
    assert isinstance(part.segment, TextSegment)
    return part.segment


def with_text(part: Part, **changes: Any) -> Part:
    """`part` with other fields in its segment."""
    return dataclasses.replace(part, segment=dataclasses.replace(text(part), **changes))


def off_policy(part: Part, log_ratios: torch.Tensor) -> Part:
    """`part` whose recorded pi_old differs from its policy by these log-ratios `(T,)`."""
    return with_text(part, log_probs=text(part).log_probs - log_ratios)


def train_text(
    backend: FSDPBackend, algorithm: TokenAlgorithm, part: Part, *, progress: Progress = START, **geometry: Any
) -> Metrics:
    """All updates on one rollout; `geometry` are the settings of TokenGeometry."""
    return TrainStack(backend, algorithm, TokenGeometry(**geometry)).train(Batch.of(part, 0, ranks=1), progress)
