"""What became of a sample under one scorer. Imports no torch: scorer processes start with it."""

from __future__ import annotations

import dataclasses
import math
import numbers

from unirl.reward.scorer import Scorer, ScorerInput, Unscored

_LARGEST = 3.4028234663852886e38  # of float32, in which scores are kept


class BrokenScorerError(ValueError):
    """A scorer returned what is no list of scores, one a sample."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finite value and no cause, or NaN, a cause and the error that was raised, if one was."""

    value: float
    cause: str = ""
    error: Exception | None = None


def isolate(name: str, scorer: Scorer, samples: list[ScorerInput]) -> list[Outcome]:
    """An outcome per sample; a batch that raises is halved until the samples to blame stand alone.

    Every call gets metadata of its own: samples of a prompt share theirs, and so do scorers.

    BrokenScorerError where the scorer breaks its contract: how many scores it returns, and of which type.
    """
    if not samples:
        return []
    try:
        returned = scorer.score([sample.own() for sample in samples])
    except Exception as error:  # noqa: BLE001 - scorers are anybody's code; what they raise costs a sample, not the run
        if len(samples) == 1:
            return [Outcome(math.nan, f"{name}: {samples[0].id}: {type(error).__name__}: {error}", error)]
        middle = len(samples) // 2
        return isolate(name, scorer, samples[:middle]) + isolate(name, scorer, samples[middle:])
    _check_returned(name, returned, len(samples))
    return [_outcome(name, sample, value) for sample, value in zip(samples, returned, strict=True)]


def _check_returned(name: str, returned: object, count: int) -> None:
    if not isinstance(returned, list | tuple):
        raise BrokenScorerError(
            f"scorer {name} returned {type(returned).__name__}, not a list of floats (an array has .tolist())"
        )
    if len(returned) != count:
        raise BrokenScorerError(f"scorer {name} returned {len(returned)} scores for {count} samples")
    for value in returned:
        if not isinstance(value, numbers.Real):
            raise BrokenScorerError(
                f"scorer {name} returned a {type(value).__name__} ({value!r}) as a score: return a float, "
                'and float("nan") for a sample that cannot be scored'
            )


def _outcome(name: str, sample: ScorerInput, value: float) -> Outcome:
    if isinstance(value, Unscored):
        return Outcome(math.nan, f"{name}: {sample.id}: {value.cause}")
    if math.isfinite(value) and abs(value) <= _LARGEST:
        return Outcome(float(value))
    return Outcome(math.nan, f"{name}: {sample.id}: the score is {value} (prompt {sample.prompt!r})")
