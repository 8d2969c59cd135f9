"""Samples and scorers for the tests of the reward side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unirl.reward.scorer import Scorer, ScorerInput, Unscored
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class Rule(Scorer):
    """One function of one sample, over a batch."""

    rule: Callable[[ScorerInput], Any]

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self.rule(sample) for sample in samples]


def cause(score: float) -> str:
    """Why there is no score."""
    assert isinstance(score, Unscored)
    return score.cause


def level_of(sample: ScorerInput) -> float:
    """The grey level of the first pixel: what `generated` puts there is the row."""
    return float(sample.picture[0, 0, 0])


def generated(prompts: list[str], branch: int = 1, metadata: list[dict[str, Any]] | None = None) -> Sample:
    """A filled Sample whose picture of row i is uniformly i / 255."""
    roots = Part(
        ids=[root_id(0, row) for row in range(len(prompts))],
        metadata=metadata or [{} for _ in prompts],
        media=Media(texts=prompts),
    )
    request = Sample((roots,)).fork(branch, DiffusionSamplingParams(steps=2, height=4, width=4))
    levels = torch.arange(len(request.frontier)) / 255
    media = Media(images=levels.reshape(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous())
    return request.with_frontier(request.frontier.fill(media=media, segment=None, conditions=None, version=0))


def answered(texts: list[str], metadata: list[dict[str, Any]] | None = None) -> Sample:
    """A filled Sample in which a language model wrote `texts[i]` to prompt i."""
    roots = Part(
        ids=[root_id(0, row) for row in range(len(texts))],
        metadata=metadata or [{} for _ in texts],
        media=Media(texts=[f"prompt {row}" for row in range(len(texts))]),
    )
    request = Sample((roots,)).fork(1, DiffusionSamplingParams(steps=2, height=4, width=4))
    media = Media(texts=texts)
    return request.with_frontier(request.frontier.fill(media=media, segment=None, conditions=None, version=0))


def service(max_invalid: float = 0.0, **scorers: Scorer | WeightedScorer) -> RewardService:
    weighted = {name: s if isinstance(s, WeightedScorer) else WeightedScorer(s) for name, s in scorers.items()}
    return RewardService(RewardConfig(weighted, max_invalid=max_invalid))


def accepted(judge: RewardService, sample: Sample) -> Scores:
    """What a trainer takes: scores, unless too many samples have none."""
    return judge.score(sample).accepted(judge.config.max_invalid)


def entry(image: np.ndarray | None = None, prompt: str = "", **metadata: Any) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt=prompt, image=image, metadata=metadata)


def wrote(text: str | None, prompt: str = "", **metadata: Any) -> ScorerInput:
    return ScorerInput(id="r0.p0/0", prompt=prompt, text=text, metadata=metadata)


def one(scorer: Scorer, text: str | None, prompt: str = "", **metadata: Any) -> float:
    (score,) = scorer.score([wrote(text, prompt, **metadata)])
    return score
