"""Evaluation: held-out prompts, deterministic sampling, a random stream of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from unirl.data.prompts import PromptSource, as_roots
from unirl.observability.grids import save_grid
from unirl.reward.scorer import Scorer, SetMeasure
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer, set_measures
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.seed import derive_seed


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """prompts:            held-out prompts
    samples_per_prompt: pictures of each
    every:              steps between evaluations; before training and after the last step there is always one
    scorers:            judged beside the reward and never trained on
    measures:           figures of the whole set, such as diversity
    pictures:           samples of each prompt that are drawn in the grids
    """

    prompts: PromptSource
    samples_per_prompt: int = 4
    every: int = 50
    scorers: dict[str, Scorer] = dataclasses.field(default_factory=dict)
    measures: dict[str, SetMeasure] = dataclasses.field(default_factory=dict)
    pictures: int = 4

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "every", "pictures"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")

    def due(self, done: int, total: int) -> bool:
        """Whether an evaluation follows `done` of `total` steps."""
        return done == total or done % self.every == 0

    def request(self, sampling: DiffusionSamplingParams) -> Sample:
        """The same prompts and noise at every evaluation of a run, so that pictures can be compared."""
        own_stream = dataclasses.replace(sampling.deterministic(), seed=derive_seed(sampling.seed, "evaluation"))
        return Sample((as_roots(list(self.prompts.rows()), 0),)).fork(self.samples_per_prompt, own_stream)

    def judges(self, reward: RewardConfig) -> RewardConfig:
        """The reward's scorers and the held-out ones; none of them stops the run."""
        both = sorted(set(reward.scorers) & set(self.scorers))
        if both:
            raise ValueError(f"eval.scorers {both} carry the name of a reward scorer; give them names of their own")
        held_out = {name: WeightedScorer(scorer, required=False) for name, scorer in self.scorers.items()}
        return dataclasses.replace(reward, scorers={**reward.scorers, **held_out}, max_invalid=0.99)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    metrics:  `eval/...` figures
    pictures: `(N, 3, H, W)` in the order of prompts, `per_prompt` of each
    captions: one a prompt
    """

    metrics: dict[str, float]
    pictures: torch.Tensor | None
    captions: list[str]
    per_prompt: int

    def save_pictures(self, folder: Path, step: int) -> None:
        """`eval_<step>.png`: one prompt a column, one noise a row."""
        if self.pictures is not None:
            by_noise = self.pictures.unflatten(0, (len(self.captions), self.per_prompt)).transpose(0, 1).flatten(0, 1)
            save_grid(by_noise, folder / f"eval_{step:06d}.png", columns=len(self.captions), captions=self.captions)


def judge(sample: Sample, service: RewardService, config: EvalConfig) -> Evaluation:
    """Figures and pictures of a filled evaluation sample."""
    scores = service.score(sample)
    valid = scores.total[scores.valid]
    metrics = {"eval/reward": float(valid.double().mean()) if len(valid) else float("nan")}
    for name, column in scores.components.items():
        finite = column[torch.isfinite(column)]
        metrics[f"eval/{name}"] = float(finite.double().mean()) if len(finite) else float("nan")
    metrics.update({f"eval/{name}": value for name, value in set_measures(sample, config.measures).items()})
    media, prompts = sample.frontier.media, sample.roots.media
    assert media is not None
    assert prompts is not None
    assert prompts.texts is not None
    shown = min(config.pictures, config.samples_per_prompt)
    pictures = media.images
    if pictures is not None:
        pictures = pictures.unflatten(0, (len(prompts.texts), config.samples_per_prompt))[:, :shown].flatten(0, 1)
    return Evaluation(metrics, pictures, prompts.texts, shown)
