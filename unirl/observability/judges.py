"""Does the reward mean what it says? Held-out judges and diversity beside the reward that was trained."""

from __future__ import annotations

import dataclasses
from typing import Any

from unirl.observability.formatting import change, figure
from unirl.observability.history import History, Points

EVAL = "eval/"
PASS_AT = "pass@"  # `eval/pass@4`

# How far, between two scorers that both lie in [0, 1], the gap may grow beyond what it was before training.
LARGEST_GAP = 0.05
# The share of the diversity before training below which samples count as collapsed.
LEAST_DIVERSITY = 0.75


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The `eval/` metrics of a run by their part in it, full names.

    trained:   scorers that the run is rewarded by; the first one stands for the trained reward. None in SFT
    judges:    scorers outside of the reward, which is never trained on what they say
    diversity: measures of how different the samples of a prompt are
    others:    everything else
    passes:    chances that the best of k samples is a success, k rising
    """

    trained: list[str]
    judges: list[str]
    diversity: list[str]
    others: list[str]
    passes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Parting:
    """A figure that no longer follows the trained reward, without a break from the evaluation at step `since` on."""

    name: str
    since: int
    message: str


def sort_evaluation(history: History, settings: dict[str, Any]) -> Evaluation:
    """Sort the evaluation's metrics by `settings`, the flat recipe: `reward.scorers.*` are trained on."""
    rewards = _children(settings, "reward.scorers.")
    judges = _children(settings, "eval.scorers.") | _children(settings, "eval.reward.scorers.")
    groups = Evaluation([], [], [], [])
    for name in history.names(EVAL):
        short = name.removeprefix(EVAL)
        if short in rewards or (short == "reward" and rewards):
            groups.trained.append(name)
        elif short in judges or short == "reward":
            groups.judges.append(name)
        elif short.startswith(PASS_AT):
            groups.passes.append(name)
        elif "diversity" in short:
            groups.diversity.append(name)
        else:
            groups.others.append(name)
    groups.passes.sort(key=lambda name: float(name.removeprefix(f"{EVAL}{PASS_AT}")))
    total = f"{EVAL}reward"
    if total not in groups.trained:
        return groups
    # A single scorer tells more by itself than times its weight: judges of the same scale can be laid beside it.
    scorers = [name for name in groups.trained if name != total]
    single = (
        len(rewards) == len(scorers) == 1 and settings.get(f"reward.scorers.{scorers[0][len(EVAL) :]}.weight", 1.0) > 0
    )
    return dataclasses.replace(groups, trained=scorers if single else [total, *scorers])


def find_partings(history: History, evaluation: Evaluation) -> list[Parting]:
    """Judges that part from the trained reward at the last evaluation, and diversity that collapsed.

    A judge on the reward's scale (both in [0, 1]) parts when the gap grew by more than LARGEST_GAP since the first
    evaluation; on another scale, when it fell while the trained reward rose. Diversity has collapsed below
    LEAST_DIVERSITY of what it was.
    """
    reward = history.finite(evaluation.trained[0]) if evaluation.trained else []
    found = [_judge_parting(name, reward, history.finite(name)) for name in evaluation.judges]
    found += [_collapse(name, history.finite(name)) for name in evaluation.diversity]
    return [parting for parting in found if parting is not None]


def _judge_parting(name: str, reward: Points, judge: Points) -> Parting | None:
    judged = dict(judge)
    pairs = [(step, value, judged[step]) for step, value in reward if step in judged]
    if len(pairs) < 2:
        return None
    _, reward_before, judge_before = pairs[0]
    _, reward_after, judge_after = pairs[-1]
    same_scale = all(0 <= value <= 1 for _, *values in pairs for value in values)
    if same_scale:
        parted = [(s, (r - j) - (reward_before - judge_before) > LARGEST_GAP) for s, r, j in pairs]
    else:
        parted = [(s, j < judge_before and r > reward_before) for s, r, j in pairs]
    if not parted[-1][1]:
        return None
    label = name.removeprefix(EVAL)
    moved = (
        f"the trained reward went from {figure(reward_before)} to {figure(reward_after)} "
        f"({change(reward_before, reward_after)}) while {label} went from {figure(judge_before)} to "
        f"{figure(judge_after)} ({change(judge_before, judge_after)})"
    )
    return Parting(name, _since(parted), f"{label} parts from the trained reward: {moved}")


def _collapse(name: str, points: Points) -> Parting | None:
    if len(points) < 2 or points[0][1] <= 0:
        return None
    before, after = points[0][1], points[-1][1]
    parted = [(step, value < LEAST_DIVERSITY * before) for step, value in points]
    if not parted[-1][1]:
        return None
    label = name.removeprefix(EVAL)
    return Parting(
        name,
        _since(parted),
        f"samples collapse: {label} fell from {figure(before)} to {figure(after)}, "
        f"{after / before:.0%} of what it was before training",
    )


def _since(parted: list[tuple[int, bool]]) -> int:
    """The first step of the unbroken stretch that reaches to the end."""
    since = parted[-1][0]
    for step, is_parted in reversed(parted):
        if not is_parted:
            break
        since = step
    return since


def _children(settings: dict[str, Any], prefix: str) -> set[str]:
    return {key.removeprefix(prefix).split(".")[0] for key in settings if key.startswith(prefix)}
