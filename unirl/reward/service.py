"""RewardService: every scorer over a batch, weighted, with a failure costing the sample that caused it.

    Sample -> scorer_inputs -> each scorer (bisected where it raises) -> components -> weighted sum -> Scores

A failure is NaN, never 0: 0 is a score, and the worst one under many scorers. Whether too many failed is for the driver
to say, by `Scores.accepted`: a rank sees its shard only.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from unirl.data.lines import listing
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.reward.outcome import Outcome, isolate
from unirl.reward.scorer import Scorer, ScorerInput, SetMeasure
from unirl.reward.time_limit import TimeLimited, check_time_limit
from unirl.types.media import Media, to_uint8
from unirl.types.reward import Failure, Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import ancestor_id

_log = logging.getLogger(__name__)
_PICTURE = "picture"  # the culprit where what was generated is broken
_SHOWN = 8  # values in a message

# Metadata is what JSON can say; a list in `when` is a choice.
Plain = bool | int | float | str


class Prompted(Protocol):
    """A prompt with what travels with it: a row of a prompt source, or what a scorer sees of a sample."""

    @property
    def prompt(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class WeightedScorer:
    """One scorer of a reward.

    weight:   finite; a negative one makes a penalty
    required: False keeps it out of the reward: it is only logged, and its failures invalidate nothing
    time_limit: seconds that one sample may take; the scorer then runs in processes of its own, sample by sample, and a
                sample that takes longer is invalid. None: what the scorer's class says, mostly no limit
    processes:  how many of them
    when:       `{key: value}` or `{key: [value, ...]}`: it scores only samples whose prompt has one of these values
                under every key of its metadata. To the others it does not apply: their total goes without it
    """

    scorer: Scorer
    weight: float = 1.0
    required: bool = True
    time_limit: float | None = None
    processes: int = 1
    when: dict[str, Plain | tuple[Plain, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of a scorer must be finite, got {self.weight}")
        empty = [key for key, wanted in self.when.items() if wanted == ()]
        if empty:
            raise ValueError(f"when.{empty[0]} is an empty list, which no prompt has: name the values it applies to")
        check_time_limit(self.scorer, self.time_limit, self.processes)

    def applies(self, metadata: Mapping[str, Any]) -> bool:
        """Whether it scores samples of a prompt with this metadata."""
        return all(key in metadata and _is_one_of(metadata[key], wanted) for key, wanted in self.when.items())

    @property
    def limit(self) -> float | None:
        """The time limit in force."""
        return self.scorer.time_limit if self.time_limit is None else self.time_limit

    @property
    def counts(self) -> bool:
        """True when it takes part in the reward: a weight of 0 has no influence, not even through a NaN."""
        return self.required and self.weight != 0


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """scorers: by name; max_invalid: the share of invalid samples in a rollout above which the run stops, in [0, 1)."""

    scorers: dict[str, WeightedScorer]
    max_invalid: float = 0.0

    def __post_init__(self) -> None:
        if not any(weighted.counts for weighted in self.scorers.values()):
            weights = {name: weighted.weight for name, weighted in self.scorers.items()}
            raise ValueError(f"a reward needs a required scorer of non-zero weight, got weights {weights}")
        if not 0 <= self.max_invalid < 1:
            raise ValueError(f"max_invalid is a share in [0, 1), got {self.max_invalid}")

    def refuse_names(self, taken: Iterable[str]) -> None:
        """ValueError for a scorer whose figure would stand in the place of another of that name."""
        both = sorted(set(taken) & set(self.scorers))
        if both:
            raise ValueError(f"scorers named {both}: these are names of other figures; give them names of their own")

    def refuse_unscored(self, prompts: Iterable[Prompted]) -> None:
        """ValueError for a prompt without a scorer that counts in its reward."""
        counting = [weighted for weighted in self.scorers.values() if weighted.counts]
        for row in prompts:
            if not any(weighted.applies(row.metadata) for weighted in counting):
                routes = {name: weighted.when for name, weighted in self.scorers.items() if weighted.counts}
                raise ValueError(
                    f"no scorer that counts in the reward applies to the prompt {row.prompt!r} with metadata "
                    f"{dict(row.metadata)}: they are for {routes}; add one for it, or take the prompt out"
                )

    def refuse_idle(self, prompts: Sequence[Prompted]) -> None:
        """ValueError for a scorer that applies to none of the prompts."""
        idle = self.absent([row.metadata for row in prompts])
        if idle:
            when = self.scorers[idle[0]].when
            known = "; ".join(f"{key}: {_some(row.metadata.get(key) for row in prompts)}" for key in when)
            raise ValueError(f"the scorer {idle[0]} is for prompts with {when}, and no prompt is one. There is {known}")

    def refuse_rows(self, prompts: Iterable[Prompted], origin: str) -> None:
        """ValueError for prompts whose samples could not be scored by a scorer that counts in the reward.

        origin: what the message calls the source of the prompts
        """
        problems = [
            f"{origin}: prompt {number}, {row.prompt!r}: {problem}"
            for number, row in enumerate(prompts, start=1)
            for problem in self._row_problems(row)
        ]
        if problems:
            raise ValueError(f"{listing(problems)}: mend them, or keep the scorer from such prompts with its `when`")

    def _row_problems(self, row: Prompted) -> Iterator[str]:
        shown = ScorerInput(id="the row", prompt=row.prompt, text="", metadata=dict(row.metadata))
        for name, weighted in self.scorers.items():
            if weighted.counts and weighted.applies(row.metadata):
                try:
                    weighted.scorer.check_row(shown)
                except ValueError as error:
                    yield f"scorer {name}: {error}"

    def absent(self, metadata: Sequence[Mapping[str, Any]]) -> list[str]:
        """The scorers that apply to none of these rows."""
        return [name for name, weighted in self.scorers.items() if not any(map(weighted.applies, metadata))]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every component, 0 for one that does not count: what `Part.compute_advantages` takes."""
        return {name: weighted.weight if weighted.counts else 0.0 for name, weighted in self.scorers.items()}


class RewardService(Remote):
    """Scores the frontier of a Sample, beside whatever its siblings do."""

    beside: ClassVar[bool] = True

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._limited = {
            name: TimeLimited(name, weighted.scorer, weighted.limit, weighted.processes)
            for name, weighted in config.scorers.items()
            if weighted.limit is not None
        }
        for name, weighted in config.scorers.items():
            _connect(name, weighted)

    def close(self) -> None:
        """End the processes of the scorers that have a time limit, and close the others."""
        for limited in self._limited.values():
            limited.close()
        for weighted in self.config.scorers.values():
            weighted.scorer.close()

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def score(self, sample: Sample) -> Scores:
        """Scores of the N frontier rows: components unweighted, total the weighted sum of those that apply to a row.

        BrokenScorerError where a scorer breaks its contract (how many and what it returns), ValueError for a row
        without a scorer.
        """
        inputs = scorer_inputs(sample)
        self.config.refuse_unscored(inputs)
        broken = _broken_pictures(sample.frontier)
        failures = [[Failure(_PICTURE, broken[row].cause)] if row in broken else [] for row in range(len(inputs))]
        total = torch.zeros(len(inputs), dtype=torch.float64)
        total[list(broken)] = torch.nan
        components: dict[str, torch.Tensor] = {}
        for name, weighted in self.config.scorers.items():
            rows = [row for row, one in enumerate(inputs) if row not in broken and weighted.applies(one.metadata)]
            components[name], failed = self._column(name, inputs, rows)
            if weighted.counts:
                total[rows] += weighted.weight * components[name][rows].double()
                for row, outcome in failed.items():
                    failures[row].append(Failure(name, outcome.cause, outcome.error))
        return Scores(total=total.float(), components=components, failures=[tuple(row) for row in failures])

    def _column(self, name: str, inputs: list[ScorerInput], rows: list[int]) -> tuple[torch.Tensor, dict[int, Outcome]]:
        """Scores `(N,)` of one scorer for these rows, NaN where there is none, and its failures."""
        outcomes = self._outcomes(name, [inputs[row] for row in rows])
        column = torch.full((len(inputs),), torch.nan)
        column[rows] = torch.tensor([outcome.value for outcome in outcomes])
        failures = {row: outcome for row, outcome in zip(rows, outcomes, strict=True) if outcome.cause}
        if failures:
            first = _first(failures).cause
            _log.warning("scorer %s failed on %d of %d samples; first: %s", name, len(failures), len(rows), first)
        return column, failures

    def _outcomes(self, name: str, samples: list[ScorerInput]) -> list[Outcome]:
        if name in self._limited:
            return self._limited[name].score(samples)
        return isolate(name, self.config.scorers[name].scorer, samples)


def _connect(name: str, weighted: WeightedScorer) -> None:
    try:
        weighted.scorer.connect()
    except ValueError as error:
        if weighted.counts:
            raise ValueError(f"scorer {name}: {error}") from error
        _log.warning("scorer %s, which is only logged, has no scores so far: %s", name, error)


def scorer_inputs(sample: Sample) -> list[ScorerInput]:
    """The frontier rows as scorers see them: prompt of the root, content and metadata of the row."""
    part, prompts = sample.frontier, sample.roots.media
    if prompts is None or prompts.texts is None:
        raise ValueError("the roots of the Sample carry no texts: a scorer needs the prompts")
    if part.media is None:
        raise ValueError("the frontier of the Sample is not filled: generate before scoring")
    prompt_of = dict(zip(sample.roots.ids, prompts.texts, strict=True))
    source_of = dict(zip(sample.roots.ids, _only_sources(prompts), strict=True))
    media = part.media
    images = None if media.images is None else _frozen(to_uint8(media.images))
    videos = None if media.videos is None else [_frozen(to_uint8(video)) for video in media.videos]
    audio = None if media.audio is None else _frozen(media.audio.float())
    return [
        ScorerInput(
            id=sample_id,
            prompt=prompt_of[ancestor_id(sample_id, 0)],
            image=None if images is None else images[row],
            video=None if videos is None else videos[row],
            fps=media.fps,
            audio=None if audio is None else audio[row],
            audio_rate=media.audio_rate,
            text=None if media.texts is None else media.texts[row],
            source=source_of[ancestor_id(sample_id, 0)],
            metadata=part.metadata[row],
        )
        for row, sample_id in enumerate(part.ids)
    ]


def _only_sources(prompts: Media) -> list[np.ndarray | None]:
    """The source picture of each prompt that comes with exactly one."""
    rows = prompts.sources or [[] for _ in prompts.required_texts]
    return [_frozen(to_uint8(pictures[0][None]))[0] if len(pictures) == 1 else None for pictures in rows]


def _frozen(values: torch.Tensor) -> np.ndarray:
    """What one scorer draws on, the next would see."""
    array = values.numpy()
    array.setflags(write=False)
    return array


def set_measures(sample: Sample, measures: dict[str, SetMeasure]) -> dict[str, float]:
    """Every figure of every measure over the frontier, as `name/figure`; samples with broken pictures are left out."""
    broken = _broken_pictures(sample.frontier)
    inputs = [entry for row, entry in enumerate(scorer_inputs(sample)) if row not in broken]
    if not inputs:
        raise ValueError(f"none of the {len(broken)} pictures can be measured: {_first(broken).cause}")
    return {
        f"{name}/{figure}": value
        for name, measure in measures.items()
        for figure, value in measure.measure([entry.own() for entry in inputs]).items()
    }


def _broken_pictures(part: Part) -> dict[int, Outcome]:
    """Rows whose picture (video, sound) is not finite: as uint8 it would look like any other picture."""
    if part.media is None:
        return {}
    kinds = {"picture": part.media.images, "video": part.media.videos, "sound": part.media.audio}
    broken: dict[int, Outcome] = {}
    for kind, values in kinds.items():
        finite = [] if values is None else torch.isfinite(values).flatten(1).all(1).tolist()
        for row, ok in enumerate(finite):
            if not ok:
                broken[row] = Outcome(math.nan, f"{part.ids[row]}: the {kind} is not finite")
    return broken


def _first(failures: dict[int, Outcome]) -> Outcome:
    return failures[min(failures)]


def _is_one_of(value: object, wanted: Plain | tuple[Plain, ...]) -> bool:
    """Equality that tells true from 1, as JSON does."""
    choices = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def _some(values: Iterable[object]) -> str:
    """The first distinct ones, for a message."""
    distinct = list(dict.fromkeys(map(repr, values)))
    return ", ".join(distinct[:_SHOWN]) + (", ..." if len(distinct) > _SHOWN else "")
