"""Evaluation by a suite: sample every prompt, score, tabulate by skill.

    Suite -> requests (whole prompts, a batch at a time) -> engine -> RewardService -> Judged rows -> table, JSON, grids

The noise of a sample follows from the seed, its prompt's number and its own: the same command gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Literal

import torch

from unirl.config.error import ConfigError, nearest
from unirl.config.recipes import shipped_recipes
from unirl.data.prompts import PromptRow, as_roots, plain_texts
from unirl.data.suite_prompts import ALL, answer_skills, skill_of
from unirl.distributed.tensor.plane import resolved
from unirl.observability.charts import evenly
from unirl.observability.clips import stills
from unirl.observability.progress import ProgressLine
from unirl.observability.skills import Tally, tally
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.geneval2 import GenEval2, geometric_mean
from unirl.reward.service import RewardService
from unirl.trainer.domains import RunnableConfig
from unirl.trainer.evaluation import TOTAL
from unirl.trainer.flow_sft import SFTConfig
from unirl.trainer.restore import Restored, restored, untrained
from unirl.trainer.suite import Suite
from unirl.trainer.text_sft import TextSFTConfig
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, SamplingParams
from unirl.types.seed import derive_seed

_HOPELESS = 32  # samples without a single score after which an evaluation is given up
_SHOWN, _SHOWN_EACH = 12, 8  # prompts of a skill whose pictures are kept to look at, and pictures of each
_PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is evaluated.

    model:     folder of a run, or a recipe, whose model is evaluated as training would start from it
    overrides: settings of the recipe to change
    step:      a run's checkpoint; None takes the newest
    weights:   None takes those that the run's evaluations show
    number:    samples of each prompt; None takes the suite's
    seed:      key of all noise
    """

    model: str
    overrides: tuple[str, ...] = ()
    step: int | None = None
    weights: Literal["live", "ema"] | None = None
    number: int | None = None
    seed: int = 0

    def opened(self) -> AbstractContextManager[Restored]:
        """The model with its weights loaded."""
        if Path(self.model).is_dir():
            if not (Path(self.model) / "config.yaml").is_file():
                raise ConfigError(
                    f"{self.model} is no run: it holds no config.yaml; to evaluate exported weights name a recipe of "
                    f"their family, and model.checkpoint={self.model}"
                )
            return restored(Path(self.model), self.step, self.overrides)
        if not self.model.endswith((".yaml", ".yml")) and self.model not in shipped_recipes():
            raise ConfigError(
                f"{self.model} is neither a run's folder nor a recipe; to evaluate weights of a hub name a recipe of "
                f"their family, and model.checkpoint={self.model}; {nearest(self.model, shipped_recipes())}"
            )
        if self.step is not None:
            raise ConfigError(f"--step {self.step} is of a run, and {self.model} is a recipe; leave it out")
        return untrained(self.model, self.overrides)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A sample.

    prompt:  its row in the suite
    scores:  by figure, of the scorers that apply to it; NaN where it has none
    answers: by scorer that applies to it, the probability of the right answer to each question; empty where it has none
    cause:   why it is invalid, or ""
    text:    what a language model wrote
    """

    id: str
    prompt: int
    scores: dict[str, float]
    answers: dict[str, list[float]]
    cause: str
    text: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class SuiteEvaluation:
    """samples: those of a prompt next to each other; pictures: `(S, 3, H, W)`, the first of each prompt shown, by row
    sampling: how they were made; step, weights: by what
    """

    suite: Suite
    config: RunnableConfig
    sampling: SamplingParams
    step: int | None
    weights: Literal["live", "ema"]
    samples: list[Judged]
    pictures: dict[int, torch.Tensor]

    def tallies(self) -> list[Tally]:
        """For each figure a line a skill of the prompts, and one of all; for answers, one a skill of the questions."""
        lines = []
        for figure in dict.fromkeys(figure for sample in self.samples for figure in sample.scores):
            lines += self._by_prompt(figure)
        for scorer in self.suite.answering:
            lines += self._by_question(scorer)
        return lines

    def _by_prompt(self, figure: str) -> list[Tally]:
        samples = [sample for sample in self.samples if figure in sample.scores]
        prompts = [sample.prompt for sample in samples]
        values = [sample.scores[figure] for sample in samples]
        own = [skill_of(self.suite.rows[prompt]) for prompt in prompts]
        lines = []
        for skill in dict.fromkeys(skill for skill in own if skill is not None):
            rows = [row for row, name in enumerate(own) if name == skill]
            lines.append(tally(figure, skill, [values[row] for row in rows], [prompts[row] for row in rows]))
        return [*lines, tally(figure, ALL, values, prompts)]

    def _by_question(self, scorer: str) -> list[Tally]:
        found: dict[str, list[tuple[float, int]]] = {}
        for sample in self.samples:
            skills = answer_skills(self.suite.rows[sample.prompt])
            if skills and scorer in sample.answers:
                answers = sample.answers[scorer] or [math.nan] * len(skills)
                for skill, answer in zip(skills, answers, strict=True):
                    found.setdefault(skill, []).append((answer, sample.prompt))
        return [tally(f"{scorer}/answers", skill, *zip(*pairs, strict=True)) for skill, pairs in found.items()]


def evaluate(asked: Asked, suite: Suite) -> SuiteEvaluation:
    """Sample and score the whole suite. ConfigError where the model cannot take it, or nothing can be scored."""
    with asked.opened() as found, closing(_Judges(suite)) as judges:
        number = suite.samples_per_prompt if asked.number is None else asked.number
        sampling = _sampling(found.config, asked.seed, number)
        batch = _batch_size(found.config)
        engine = found.sampler(asked.weights, batch)
        engine.refuse(Media(texts=plain_texts(suite.rows)), sampling)
        shown, samples, pictures = _shown(suite.rows), list[Judged](), dict[int, torch.Tensor]()
        for first, request in _requests(suite.rows, sampling, number, max(1, batch // number)):
            filled = resolved(engine.generate(request), reads=("media",))
            samples += judges.judged(filled, first, number)
            _give_up(samples, len(suite.rows) * number)
            for row, own in enumerate(_pictures(filled, number), first):
                if row in shown:
                    pictures[row] = own
        return SuiteEvaluation(
            suite, found.config, sampling, found.step, found.chosen(asked.weights), samples, pictures
        )


class _Judges:
    """The suite's scorers; those of questions through `_Answers`, so that no picture is read twice."""

    def __init__(self, suite: Suite) -> None:
        scorers = dict(suite.reward.scorers)
        self._answers = {name: _Answers(scorer) for name, scorer in suite.answering.items()}
        for name, answers in self._answers.items():
            scorers[name] = dataclasses.replace(scorers[name], scorer=answers)
        self._totals = sum(weighted.counts for weighted in scorers.values()) > 1
        self._service = RewardService(dataclasses.replace(suite.reward, scorers=scorers))

    def judged(self, filled: Sample, first: int, number: int) -> list[Judged]:
        """The frontier's rows; `number` of each prompt, the first of which is row `first` of the suite."""
        scores, part = self._service.score(filled), filled.frontier
        assert part.media is not None
        texts = part.media.texts
        return [
            Judged(
                id=sample_id,
                prompt=first + row // number,
                scores=self._figures(scores, row, part),
                answers={
                    name: answers.kept.get(sample_id, [])
                    for name, answers in self._answers.items()
                    if self._applies(name, part.metadata[row])
                },
                cause=scores.causes[row],
                text=None if texts is None else texts[row],
            )
            for row, sample_id in enumerate(part.ids)
        ]

    def close(self) -> None:
        """End what the scorers started."""
        self._service.close()

    def _applies(self, name: str, metadata: dict[str, Any]) -> bool:
        return self._service.config.scorers[name].applies(metadata)

    def _figures(self, scores: Scores, row: int, part: Part) -> dict[str, float]:
        figures = {TOTAL: float(scores.total[row])} if self._totals else {}
        for name, column in scores.components.items():
            if not self._applies(name, part.metadata[row]):
                continue
            if name not in self._answers:
                figures[name] = float(column[row])
                continue
            answers = self._answers[name].kept.get(part.ids[row], [])
            figures[f"{name}/arithmetic"] = statistics.fmean(answers) if answers else math.nan
            figures[f"{name}/geometric"] = geometric_mean(answers) if answers else math.nan
        return figures


@dataclasses.dataclass(frozen=True)
class _Answers(Scorer):
    """GenEval 2, with the probability of each right answer kept by the sample's id."""

    scorer: GenEval2
    kept: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        rows = self.scorer.probabilities(samples)
        self.kept.update((sample.id, row) for sample, row in zip(samples, rows, strict=True))
        # Alone, a sample without answers says why it has none.
        return [
            self.scorer.combined(row) if row else self.scorer.score([sample])[0]
            for sample, row in zip(samples, rows, strict=True)
        ]


def _sampling(config: RunnableConfig, seed: int, number: int) -> SamplingParams:
    """As the run's own evaluations sample, on a stream of the suite's."""
    sampling = config.sampling
    if config.eval is not None:
        sampling = config.eval.sampled(sampling)
    elif isinstance(sampling, DiffusionSamplingParams):
        sampling = sampling.deterministic()
    if isinstance(sampling, ARSamplingParams) and sampling.temperature == 0 and number > 1:
        raise ConfigError(f"{number} samples of a prompt at temperature 0 are copies of one text: take --number 1")
    return dataclasses.replace(sampling, seed=derive_seed(seed, "suite"))


def _batch_size(config: RunnableConfig) -> int:
    """Samples in a forward: as many as the run takes."""
    if isinstance(config, SFTConfig | TextSFTConfig):
        return config.data.batch_size
    return config.rollout.batch_size or config.data.prompts_per_step * config.data.samples_per_prompt


def _requests(
    rows: tuple[PromptRow, ...], sampling: SamplingParams, number: int, prompts: int
) -> Iterator[tuple[int, Sample]]:
    """Requests of at most `prompts` prompts, each with the row of its first, and a line that tells how far it is."""
    started = time.monotonic()
    with closing(ProgressLine(len(rows), plain_seconds=_PROGRESS_SECONDS)) as progress:
        for first in range(0, len(rows), prompts):
            roots = as_roots(list(rows[first : first + prompts]), 0, first=first)
            yield first, Sample((roots,)).fork(number, sampling)
            done = first + len(roots)
            progress.update(done, {}, (time.monotonic() - started) / done * (len(rows) - done))


def _give_up(samples: list[Judged], total: int) -> None:
    """ConfigError where it is clear that nothing is ever scored."""
    if len(samples) < min(_HOPELESS, total) or any(map(math.isfinite, (v for s in samples for v in s.scores.values()))):
        return
    raise ConfigError(f"none of {len(samples)} samples has a score; first cause: {samples[0].cause}")


def _shown(rows: tuple[PromptRow, ...]) -> set[int]:
    """Rows whose pictures are kept: some of each skill."""
    groups: dict[str | None, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(skill_of(row), []).append(number)
    return {number for own in groups.values() for number in evenly(own, _SHOWN)}


def _pictures(filled: Sample, number: int) -> list[torch.Tensor]:
    """`(S, 3, H, W)`, the first of each prompt; none of a language model."""
    assert filled.frontier.media is not None
    pictures = stills(filled.frontier.media)
    return [] if pictures is None else [own[:_SHOWN_EACH].clone() for own in pictures.split(number)]
