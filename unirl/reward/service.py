"""RewardService: every scorer over a batch, weighted, with a failure costing the sample that caused it.

    Sample -> scorer_inputs -> each scorer (bisected where it raises) -> components -> weighted sum -> Scores

A failure is NaN, never 0: 0 is a score, and the worst one under many scorers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable

import numpy as np
import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.reward.outcome import Outcome, isolate
from unirl.reward.scorer import Scorer, ScorerInput, SetMeasure
from unirl.reward.time_limit import TimeLimited, check_time_limit
from unirl.types.media import to_uint8
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import ancestor_id

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WeightedScorer:
    """One scorer of a reward.

    weight:   finite; a negative one makes a penalty
    required: False keeps it out of the reward: it is only logged, and its failures invalidate nothing
    time_limit: seconds that one sample may take; the scorer then runs in processes of its own, sample by sample, and a
                sample that takes longer is invalid. None: what the scorer's class says, mostly no limit
    processes:  how many of them
    """

    scorer: Scorer
    weight: float = 1.0
    required: bool = True
    time_limit: float | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of a scorer must be finite, got {self.weight}")
        check_time_limit(self.scorer, self.time_limit, self.processes)

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
    """scorers: by name; max_invalid: the share of invalid samples in a batch above which the run stops, in [0, 1)."""

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

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every component, 0 for one that does not count: what `Part.compute_advantages` takes."""
        return {name: weighted.weight if weighted.counts else 0.0 for name, weighted in self.scorers.items()}


class RewardService(Remote):
    """Scores the frontier of a Sample. stops: whether more invalid samples than `max_invalid` end the run."""

    def __init__(self, config: RewardConfig, *, stops: bool = True) -> None:
        self.config = config
        self._stops = stops
        self._limited = {
            name: TimeLimited(name, weighted.scorer, weighted.limit, weighted.processes)
            for name, weighted in config.scorers.items()
            if weighted.limit is not None
        }
        for name, weighted in config.scorers.items():
            _connect(name, weighted)

    def close(self) -> None:
        """End the processes of the scorers that have a time limit."""
        for limited in self._limited.values():
            limited.close()

    @remote(Dispatch.DP_SCATTER, reads=("media",))
    def score(self, sample: Sample) -> Scores:
        """Scores of the N frontier rows: components unweighted, total their weighted sum.

        ValueError where a scorer breaks its contract (how many and what it returns). RuntimeError above `max_invalid`,
        unless the service never stops.
        """
        inputs = scorer_inputs(sample)
        failed = {"picture": _broken_pictures(sample.frontier)}
        components: dict[str, torch.Tensor] = {}
        total = torch.zeros(len(inputs), dtype=torch.float64)
        for name, weighted in self.config.scorers.items():
            components[name], failures = self._column(name, inputs, failed["picture"])
            if weighted.counts:
                total += weighted.weight * components[name].double()
                failed[name] = failures
        if self._stops:
            self._check_share(failed, len(inputs))
        causes = ["; ".join(rows[row].cause for rows in failed.values() if row in rows) for row in range(len(inputs))]
        return Scores(total=total.float(), components=components, causes=causes)

    def _column(
        self, name: str, inputs: list[ScorerInput], broken: dict[int, Outcome]
    ) -> tuple[torch.Tensor, dict[int, Outcome]]:
        """Scores `(N,)` of one scorer, NaN where there is none, and its failures among the rows that are not broken."""
        usable = [row for row in range(len(inputs)) if row not in broken]
        outcomes = self._outcomes(name, [inputs[row] for row in usable])
        column = torch.full((len(inputs),), torch.nan)
        column[usable] = torch.tensor([outcome.value for outcome in outcomes])
        failures = {row: outcome for row, outcome in zip(usable, outcomes, strict=True) if outcome.cause}
        if failures:
            first = _first(failures).cause
            _log.warning("scorer %s failed on %d of %d samples; first: %s", name, len(failures), len(usable), first)
        return column, failures

    def _outcomes(self, name: str, samples: list[ScorerInput]) -> list[Outcome]:
        if name in self._limited:
            return self._limited[name].score(samples)
        return isolate(name, self.config.scorers[name].scorer, samples)

    def _check_share(self, failed: dict[str, dict[int, Outcome]], count: int) -> None:
        invalid = set().union(*failed.values())
        if len(invalid) <= self.config.max_invalid * count:
            return
        culprits = {name: rows for name, rows in failed.items() if rows}
        counts = ", ".join(f"{name} on {len(rows)}" for name, rows in culprits.items())
        first = _first(next(iter(culprits.values())))
        raise RuntimeError(
            f"{len(invalid)} of {count} samples have no reward, more than max_invalid={self.config.max_invalid:g} "
            f"allows. Failed: {counts}. First cause: {first.cause}"
        ) from first.error


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
            metadata=part.metadata[row],
        )
        for row, sample_id in enumerate(part.ids)
    ]


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
        for figure, value in measure.measure(list(inputs)).items()
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
