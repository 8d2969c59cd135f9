"""Is the run sound? Checks over its metrics, each with a verdict a person can act on."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from unirl.observability.formatting import change, figure
from unirl.observability.history import History
from unirl.observability.judges import (
    EVAL,
    LARGEST_GAP,
    LEAST_DIVERSITY,
    Evaluation,
    Parting,
    find_partings,
)

# Published clip ranges of flow models start at 1e-5: a replay that is off by as much already decides what is clipped.
_STEP_TOLERANCE = 1e-5
# Of tokens the mean: in bfloat16 a few differ by 0.3 and all by 0.03 (SmolLM2), in float32 by 1e-5 and 1e-6.
_TOKEN_TOLERANCE = 0.05
_LARGEST_RATIO_DEVIATION = 1.0
_LARGEST_CLIP_FRACTION = 0.95
_LARGEST_CONSTANT_SHARE = 0.5
_LARGEST_TRUNCATED_SHARE = 0.5
_LEAST_ENTROPY = 0.1  # of what it was at the beginning
_LARGEST_GROWTH = 2.0  # of the responses, while the reward rises


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the health table.

    topic: its name within a sentence
    state: `info` where no number is right or wrong
    """

    topic: str
    name: str
    value: str
    state: Literal["ok", "warn", "info"]
    meaning: str


def check_health(history: History, evaluation: Evaluation) -> list[Check]:
    """Every check whose metrics the run has, warnings first."""
    checks = [
        _replay(history),
        _ratio(history),
        _clipping(history),
        _constant_groups(history),
        _count(history, "train/skipped", "Skipped steps", "updates left out because a gradient was not finite"),
        _count(
            history, "reward/invalid", "Invalid samples", "samples that a scorer could not score; they do not train"
        ),
        _count(
            history,
            "eval/invalid",
            "Invalid evaluation samples",
            "samples that a scorer could not score; the figures of an evaluation are means over the others",
        ),
        _entropy(history),
        _truncated(history),
        _length(history),
        _kl(history),
        _finite(history),
    ]
    found = [check for check in checks if check is not None] + _judges(history, evaluation)
    return sorted(found, key=lambda check: check.state != "warn")


def _replay(history: History) -> Check | None:
    if "train/rollout_gap" not in history:
        return None
    if "rollout/tokens" in history:
        reduction, name, tolerance = "mean", "train/rollout_gap", _TOKEN_TOLERANCE
    else:
        reduction, name, tolerance = "max", "train/rollout_gap_max", _STEP_TOLERANCE
    worst = _largest(history, name)
    return Check(
        "replay",
        f"Replay: {reduction} |log-prob - the rollout's| before an update",
        figure(worst),
        "ok" if worst <= tolerance else "warn",
        "rollout and replay compute the same log-probabilities; 0 means bit for bit"
        if worst <= tolerance
        else f"above {figure(tolerance)}, the gradient is not that of the policy that sampled; what remains with "
        "train.backend.compute_dtype=float32 is no rounding",
    )


def _ratio(history: History) -> Check | None:
    if "train/ratio_deviation" not in history:
        return None
    worst = _largest(history, "train/ratio_deviation")
    return Check(
        "ratio deviation",
        "Largest |ratio - 1| of the run",
        figure(worst),
        "ok" if worst <= _LARGEST_RATIO_DEVIATION else "warn",
        "how far one batch moved the policy; above 1 the updates are too large (lower lr, or fewer updates a batch)",
    )


def _clipping(history: History) -> Check | None:
    if "train/clip_fraction" not in history:
        return None
    share = history.closing("train/clip_fraction")
    return Check(
        "clip fraction",
        "Clipped, last tenth of the run",
        f"{share:.1%}",
        "ok" if share <= _LARGEST_CLIP_FRACTION else "warn",
        "share of terms of the loss whose gradient the clip range cut off; near 100 % hardly anything trains",
    )


def _constant_groups(history: History) -> Check | None:
    if "advantage/constant_groups" not in history:
        return None
    share = history.closing("advantage/constant_groups")
    return Check(
        "constant groups",
        "Constant groups, last tenth of the run",
        f"{share:.1%}",
        "ok" if share <= _LARGEST_CONSTANT_SHARE else "warn",
        "prompts whose samples all got the same reward and thus teach nothing",
    )


def _count(history: History, name: str, title: str, meaning: str) -> Check | None:
    if name not in history:
        return None
    count = sum(value for _, value in history.finite(name))
    return Check(title.lower(), title, figure(count), "warn" if count > 0 else "ok", meaning)


def _entropy(history: History) -> Check | None:
    if not history.finite("train/entropy"):
        return None
    before, after = history.opening("train/entropy"), history.closing("train/entropy")
    collapsed = after < _LEAST_ENTROPY * before
    return Check(
        "entropy",
        "Entropy of a token, first and last tenth of the run",
        f"{figure(before)} → {figure(after)}",
        "warn" if collapsed else "ok",
        f"below {_LEAST_ENTROPY:.0%} of what it was, samples of a prompt become one text and there is nothing left to "
        "compare (raise clip_high, add a KL, or stop earlier)"
        if collapsed
        else "how much choice is left; it falls as the policy makes up its mind",
    )


def _truncated(history: History) -> Check | None:
    if not history.finite("rollout/truncated"):
        return None
    share = history.closing("rollout/truncated")
    return Check(
        "truncated responses",
        "Truncated responses, last tenth of the run",
        f"{share:.1%}",
        "ok" if share <= _LARGEST_TRUNCATED_SHARE else "warn",
        "cut off before they ended, so that their rewards judge half an answer; raise sampling.max_new_tokens",
    )


def _length(history: History) -> Check | None:
    if not history.finite("rollout/tokens"):
        return None
    before, after = history.opening("rollout/tokens"), history.closing("rollout/tokens")
    paid = after > _LARGEST_GROWTH * before and history.closing("reward/mean") > history.opening("reward/mean")
    return Check(
        "response length",
        "Tokens of a response, first and last tenth of the run",
        f"{figure(before)} → {figure(after)}",
        "warn" if paid else "ok",
        f"the reward rose while responses grew to more than {_LARGEST_GROWTH:.0f} times their length: read whether it "
        "is length that pays"
        if paid
        else "where it grows with the reward, read whether it is length that pays",
    )


def _kl(history: History) -> Check | None:
    if not history.finite("train/kl"):
        return None
    return Check(
        "KL",
        "KL to the reference, last tenth of the run",
        figure(history.closing("train/kl")),
        "info",
        "how far the policy went from where it started",
    )


def _finite(history: History) -> Check | None:
    if not history.names():
        return None
    broken = [name for name in history.names() if len(history.finite(name)) < len(history.series(name))]
    return Check(
        "numbers that are not finite",
        "Numbers that are not finite",
        ", ".join(broken) if broken else "none",
        "warn" if broken else "ok",
        "a NaN or an infinity in a metric shows up here, whatever caused it",
    )


def _judges(history: History, evaluation: Evaluation) -> list[Check]:
    partings = {parting.name: parting for parting in find_partings(history, evaluation)}
    checks = []
    if evaluation.trained:
        meaning = f"a judge outside of the reward; its gap to the reward may grow by {LARGEST_GAP}"
        checks += [_beside(name, history, partings, meaning) for name in evaluation.judges]
    checks += [
        _beside(name, history, partings, f"must stay above {LEAST_DIVERSITY:.0%} of what it was before training")
        for name in evaluation.diversity
    ]
    return [check for check in checks if check is not None]


def _beside(name: str, history: History, partings: dict[str, Parting], meaning: str) -> Check | None:
    points = history.finite(name)
    if len(points) < 2:
        return None
    (_, before), (_, after) = points[0], points[-1]
    parting = partings.get(name)
    label = name.removeprefix(EVAL)
    return Check(
        label,
        f"Evaluation: {label}",
        f"{figure(before)} → {figure(after)} ({change(before, after)})",
        "warn" if parting else "ok",
        f"{parting.message} (since step {parting.since})" if parting else meaning,
    )


def _largest(history: History, name: str) -> float:
    values = [value for _, value in history.series(name)]
    return math.nan if any(math.isnan(value) for value in values) else max(values)
