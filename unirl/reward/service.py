"""RewardService: every scorer over a batch, weighted, with a failure costing the sample that caused it.

    Sample -> scorer_inputs -> each scorer (bisected where it raises) -> components -> weighted sum -> Scores

A failure is NaN, never 0: 0 is a score, and the worst one under many scorers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Iterable

import numpy as np
import torch

from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.reward.scorer import Scorer, ScorerInput, SetMeasure
from unirl.types.media import to_uint8
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import ancestor_id

_log = logging.getLogger(__name__)
_LARGEST = 3.4028234663852886e38  # of float32, in which scores are kept


@dataclasses.dataclass(frozen=True)
class WeightedScorer:
    """One scorer of a reward.

    weight:   finite; a negative one makes a penalty
    required: False keeps it out of the reward: it is only logged, and its failures invalidate nothing
    """

    scorer: Scorer
    weight: float = 1.0
    required: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of a scorer must be finite, got {self.weight}")

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
    """Scores the frontier of a Sample."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @remote(Dispatch.DP_SCATTER)
    def score(self, sample: Sample) -> Scores:
        """Scores of the N frontier rows: components unweighted, total their weighted sum.

        ValueError where a scorer breaks its contract (how many and what it returns); RuntimeError above `max_invalid`.
        """
        inputs = scorer_inputs(sample)
        failed = {"picture": _broken_pictures(sample.frontier)}
        components: dict[str, torch.Tensor] = {}
        total = torch.zeros(len(inputs), dtype=torch.float64)
        for name, weighted in self.config.scorers.items():
            components[name], failures = _column(name, weighted.scorer, inputs, failed["picture"])
            if weighted.counts:
                total += weighted.weight * components[name].double()
                failed[name] = failures
        self._check_share(failed, len(inputs))
        causes = ["; ".join(rows[row].cause for rows in failed.values() if row in rows) for row in range(len(inputs))]
        return Scores(total=total.float(), components=components, causes=causes)

    def _check_share(self, failed: dict[str, dict[int, _Outcome]], count: int) -> None:
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


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """A finite value and no cause, or NaN, a cause and the error that was raised, if one was."""

    value: float
    cause: str = ""
    error: Exception | None = None


def _column(
    name: str, scorer: Scorer, inputs: list[ScorerInput], broken: dict[int, _Outcome]
) -> tuple[torch.Tensor, dict[int, _Outcome]]:
    """The scores `(N,)` of one scorer, NaN where there is none, and its failures among the rows that are not broken."""
    usable = [row for row in range(len(inputs)) if row not in broken]
    outcomes = _isolate(name, scorer, [inputs[row] for row in usable])
    column = torch.full((len(inputs),), torch.nan)
    column[usable] = torch.tensor([outcome.value for outcome in outcomes])
    failures = {row: outcome for row, outcome in zip(usable, outcomes, strict=True) if outcome.cause}
    if failures:
        first = _first(failures).cause
        _log.warning("scorer %s failed on %d of %d samples; first: %s", name, len(failures), len(usable), first)
    return column, failures


def _isolate(name: str, scorer: Scorer, samples: list[ScorerInput]) -> list[_Outcome]:
    """An outcome per sample; a batch that raises is halved until the samples to blame stand alone."""
    if not samples:
        return []
    try:
        returned = scorer.score(list(samples))
    except Exception as error:  # noqa: BLE001 - scorers are anybody's code; what they raise costs a sample, not the run
        if len(samples) == 1:
            return [_Outcome(math.nan, f"{name}: {samples[0].id}: {type(error).__name__}: {error}", error)]
        middle = len(samples) // 2
        return _isolate(name, scorer, samples[:middle]) + _isolate(name, scorer, samples[middle:])
    _check_returned(name, returned, len(samples))
    return [_outcome(name, sample, value) for sample, value in zip(samples, returned, strict=True)]


def _check_returned(name: str, returned: object, count: int) -> None:
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"scorer {name} returned {type(returned).__name__}, not a list of floats (an array has .tolist())"
        )
    if len(returned) != count:
        raise ValueError(f"scorer {name} returned {len(returned)} scores for {count} samples")
    for value in returned:
        if not isinstance(value, numbers.Real):
            raise ValueError(
                f"scorer {name} returned a {type(value).__name__} ({value!r}) as a score: return a float, "
                'and float("nan") for a sample that cannot be scored'
            )


def _outcome(name: str, sample: ScorerInput, value: float) -> _Outcome:
    if math.isfinite(value) and abs(value) <= _LARGEST:
        return _Outcome(float(value))
    return _Outcome(math.nan, f"{name}: {sample.id}: the score is {value} (prompt {sample.prompt!r})")


def _broken_pictures(part: Part) -> dict[int, _Outcome]:
    """Rows whose picture (video, sound) is not finite: as uint8 it would look like any other picture."""
    if part.media is None:
        return {}
    kinds = {"picture": part.media.images, "video": part.media.videos, "sound": part.media.audio}
    broken: dict[int, _Outcome] = {}
    for kind, values in kinds.items():
        finite = [] if values is None else torch.isfinite(values).flatten(1).all(1).tolist()
        for row, ok in enumerate(finite):
            if not ok:
                broken[row] = _Outcome(math.nan, f"{part.ids[row]}: the {kind} is not finite")
    return broken


def _first(failures: dict[int, _Outcome]) -> _Outcome:
    return failures[min(failures)]
