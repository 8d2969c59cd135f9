"""Evaluation: held-out prompts, a random stream of its own, scorers that are never trained on."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch

from unirl.config.error import nearest
from unirl.data.prompts import PromptSource, as_roots
from unirl.distributed.tensor.plane import resolved
from unirl.models.base import Family
from unirl.observability.atomic import replace_file
from unirl.observability.clips import stills, write_clips
from unirl.observability.grids import before_after, save_grid
from unirl.observability.judges import EVAL
from unirl.observability.run_folder import RunFolder
from unirl.observability.texts import write_texts
from unirl.reward.scorer import Scorer, SetMeasure
from unirl.reward.service import RewardConfig, WeightedScorer, set_measures
from unirl.trainer.reads import check_reads
from unirl.trainer.run import RunConfig
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sample import Sample
from unirl.types.sampling import SamplingParams
from unirl.types.seed import derive_seed

_CLIPS = 4  # prompts of which an evaluation of videos or sounds keeps a file
TOTAL = "reward"  # `eval/reward` is the weighted sum
INVALID = "invalid"  # `eval/invalid` counts the samples without one
_MAX_INVALID = 0.99  # failures stop the run only where no sample has a reward


@dataclasses.dataclass(frozen=True)
class EvalConfig(ABC):
    """prompts:            held-out prompts
    samples_per_prompt: samples of each
    every:              steps between evaluations; before training and after the last step there is always one
    scorers:            judged beside the reward and never trained on
    measures:           figures of the whole set, such as diversity
    shown:              samples of each prompt that are kept to look at
    """

    prompts: PromptSource
    samples_per_prompt: int = 4
    every: int = 50
    scorers: dict[str, Scorer] = dataclasses.field(default_factory=dict)
    measures: dict[str, SetMeasure] = dataclasses.field(default_factory=dict)
    shown: int = 4

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "every", "shown"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {self.__dict__[name]}")

    def check(self, model: Family, sampling: SamplingParams, reward: RewardConfig, run: RunConfig) -> None:
        """ValueError where this evaluation does not fit the rest of the run."""
        reward.refuse_unscored(self.prompts.rows())
        reward.refuse_rows(self.prompts.rows(), self.prompts.origin)
        self.judges(reward).refuse_names([TOTAL, INVALID])
        check_reads(self.judges(reward), model, sampling, self.prompts.rows())
        if run.keep_best:
            self._check_best(reward, run)

    def due(self, done: int, total: int) -> bool:
        """Whether an evaluation follows `done` of `total` steps."""
        return done == total or done % self.every == 0

    @abstractmethod
    def sampled(self, sampling: SamplingParams) -> SamplingParams:
        """How an evaluation samples, by how training does."""

    def request(self, sampling: SamplingParams) -> Sample:
        """The same prompts and noise at every evaluation of a run, so that samples can be compared."""
        own_stream = dataclasses.replace(self.sampled(sampling), seed=derive_seed(sampling.seed, "evaluation"))
        return Sample((as_roots(list(self.prompts.rows()), 0),)).fork(self.samples_per_prompt, own_stream)

    def judges(self, reward: RewardConfig) -> RewardConfig:
        """The scorers of the reward that apply to one of the prompts, and the held-out ones."""
        both = sorted(set(reward.scorers) & set(self.scorers))
        if both:
            raise ValueError(f"eval.scorers {both} carry the name of a reward scorer; give them names of their own")
        absent = reward.absent([row.metadata for row in self.prompts.rows()])
        rewards = {name: weighted for name, weighted in reward.scorers.items() if name not in absent}
        held_out = {name: WeightedScorer(scorer, required=False) for name, scorer in self.scorers.items()}
        return dataclasses.replace(reward, scorers={**rewards, **held_out})

    def figures(self, reward: RewardConfig) -> list[str]:
        """Figures of this evaluation, but for those of the measures."""
        return [f"{EVAL}{name}" for name in (TOTAL, *self.judges(reward).scorers)]

    def _check_best(self, reward: RewardConfig, run: RunConfig) -> None:
        figures = self.figures(reward)
        measured = tuple(f"{EVAL}{name}/" for name in self.measures)
        if run.best_metric not in figures and not run.best_metric.startswith(measured):
            known = nearest(run.best_metric, [*figures, *(f"{prefix}..." for prefix in measured)])
            raise ValueError(f"run.best_metric={run.best_metric} is no figure of the evaluation; {known}")
        if self.every % run.save_every and run.save_every % self.every:
            raise ValueError(
                f"run.keep_best={run.keep_best} compares checkpoints that were evaluated, but with run.save_every="
                f"{run.save_every} and eval.every={self.every} most are not; make one a multiple of the other"
            )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    metrics: `eval/...` figures
    media:   what is shown: S samples of each of the P prompts, siblings next to each other
    rewards: `(P * S,)` of these
    prompts: P texts
    """

    metrics: dict[str, float]
    media: Media
    rewards: torch.Tensor
    prompts: list[str]

    @classmethod
    def of_figures(cls, metrics: dict[str, float]) -> Evaluation:
        """Figures without samples."""
        return cls(metrics, Media(texts=[]), torch.zeros(0), [])

    def save_media(self, folder: RunFolder, step: int) -> None:
        """A grid with a prompt a column and a noise a row, the first evaluation's pictures above these, and clips."""
        from safetensors.torch import load_file, save

        if not self.prompts:
            return
        samples = len(self.rewards) // len(self.prompts)
        for prompt in range(min(len(self.prompts), _CLIPS)):
            write_clips(self.media, prompt * samples, folder.samples / f"eval_{step:06d}_prompt_{prompt}")
        if self.media.texts is not None:
            write_texts(
                folder.samples / f"eval_{step:06d}.jsonl", self.prompts, self.media.texts, self.rewards.tolist()
            )
        pictures = stills(self.media)
        if pictures is None:
            return
        shape = (len(self.prompts), samples)
        by_noise = pictures.unflatten(0, shape).transpose(0, 1).flatten(0, 1)
        rewards = self.rewards.unflatten(0, shape).T.flatten().tolist()
        save_grid(
            by_noise, folder.samples / f"eval_{step:06d}.png", columns=shape[0], captions=self.prompts, rewards=rewards
        )
        first = folder.samples / "before.safetensors"
        if step == 0:
            replace_file(first, save({"pictures": pictures.contiguous()}))
        elif first.exists():
            before = load_file(first)["pictures"]
            before_after(before, pictures, folder.before_after, prompts=self.prompts)


def judge(sample: Sample, scores: Scores, config: EvalConfig) -> Evaluation:
    """Figures and samples of a filled evaluation sample, with the scores of its judges.

    Means are over the samples that have a score; `eval/invalid` says how many have no reward, where some have none.
    """
    scores.accepted(_MAX_INVALID)
    valid = scores.total[scores.valid]
    metrics = {f"{EVAL}{TOTAL}": float(valid.double().mean()) if len(valid) else float("nan")}
    if len(valid) < len(scores):
        metrics[f"{EVAL}{INVALID}"] = float(len(scores) - len(valid))
    for name, column in scores.components.items():
        finite = column[torch.isfinite(column)]
        metrics[f"{EVAL}{name}"] = float(finite.double().mean()) if len(finite) else float("nan")
    if config.measures:
        whole = resolved(sample, reads=("media",))
        metrics.update({f"{EVAL}{name}": value for name, value in set_measures(whole, config.measures).items()})
    media, prompts = sample.frontier.media, resolved(sample.roots.media)
    assert media is not None
    assert prompts is not None
    assert prompts.texts is not None
    shown = [row for row in range(len(scores)) if row % config.samples_per_prompt < config.shown]
    return Evaluation(metrics, resolved(media.select(shown)), scores.total[shown], prompts.texts)
