"""The charts of the report, each with its numbers in a table that is also its legend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from unirl.observability.charts import COLOURS, Band, Series, evenly, line_chart, stacked_bars, steps_a_point
from unirl.observability.formatting import duration, figure
from unirl.observability.history import History, Points
from unirl.observability.judges import EVAL, Evaluation, find_partings
from unirl.observability.metrics import SECONDS

_REWARD = "reward/"
# `reward/` names that describe the reward as a whole; any other is a component.
_WHOLE_REWARD = ("mean", "std", "group_std", "min", "max", "invalid")
_SPREADS = {
    "reward/std": "std, all samples",
    "reward/group_std": "std in a group",
    "reward/min": "least",
    "reward/max": "largest",
}
_MOST_EVALUATIONS = 12
# Small charts of the training step, in the order of the page.
_TRAINING = {
    "train/kl": ("KL to the reference", "how far the policy went from where it started"),
    "train/entropy": ("Entropy", "of the distribution that a token is drawn from, in nats; 0 leaves no choice"),
    "rollout/tokens": ("Response length", "tokens of a response, the mean of a rollout"),
    "rollout/truncated": ("Truncated responses", "share that sampling.max_new_tokens cut off"),
    "train/ratio_deviation": ("Ratio deviation", "max |ratio - 1| over the updates of a batch"),
    "train/clip_fraction": ("Clip fraction", "share of terms of the loss (steps, tokens) that the clip range cut off"),
    "advantage/constant_groups": ("Constant groups", "share of prompts whose samples all got the same reward"),
    "train/loss": ("Loss", "as optimised; a clipped policy loss hovers around zero and need not fall"),
    "train/grad_norm": ("Gradient norm", "before clipping"),
    "train/lr": ("Learning rate", ""),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Text in a table; colour and dashed are those of the line in the chart that it names, None for none."""

    text: str
    colour: int | None = None
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Card:
    """A chart and its numbers. warnings stand above the chart."""

    title: str
    note: str
    chart: str
    header: list[Cell]
    rows: list[list[Cell]]
    warnings: list[str] = dataclasses.field(default_factory=list)


def main_cards(history: History, evaluation: Evaluation) -> list[Card]:
    """What the run is about: the reward (the loss, where nothing is rewarded), and the evaluation."""
    cards = [
        _reward(history),
        _components(history),
        _scorers(history, evaluation),
        _passes(history, evaluation),
        _diversity(history, evaluation),
    ]
    if "reward/mean" not in history:
        cards.append(_supervised_loss(history))
    return [card for card in cards if card is not None]


def small_cards(history: History, evaluation: Evaluation) -> list[Card]:
    """One card for each further figure, the known ones first, and nothing left out."""
    supervised = "reward/mean" not in history
    shown = {"train/loss", "eval/loss"} if supervised else set()
    cards = [
        _single(history, name, title, note)
        for name, (title, note) in _TRAINING.items()
        if name in history and name not in shown
    ]
    shown |= {*_TRAINING, *evaluation.trained, *evaluation.judges, *evaluation.passes, *evaluation.diversity}
    shown |= {name for name in history.names(_REWARD) if name != "reward/invalid"}
    # eval/reward is the trained scorer times its weight where it is not among the trained ones.
    shown |= {*history.names(SECONDS), f"{EVAL}reward"}
    # A count that stayed zero is told in the health table; it needs no flat line.
    gaps = {"train/first_ratio_deviation", "train/rollout_gap", "train/rollout_gap_max"}
    counts = {"reward/invalid", "train/skipped", *gaps}
    shown |= {name for name in counts if not any(value for _, value in history.series(name))}
    return cards + [_single(history, name, name, "") for name in history.names() if name not in shown]


def time_card(history: History) -> Card | None:
    """Where the seconds of a step go."""
    whole = history.finite(f"{SECONDS}step")
    if not whole:
        return None
    steps = [step for step, _ in whole]
    shares: dict[str, list[float]] = {}
    for name in history.names(SECONDS):
        if name != f"{SECONDS}step":
            spent = dict(history.finite(name))
            shares[name.removeprefix(SECONDS)] = [spent.get(step, 0.0) for step in steps]
    named = [sum(column) for column in zip(*shares.values(), strict=True)] if shares else [0.0] * len(steps)
    shares["other"] = [max(0.0, value - part) for (_, value), part in zip(whole, named, strict=True)]
    total = math.fsum(value for _, value in whole)
    spent = {name: math.fsum(values) for name, values in shares.items()}
    rows = [
        [
            Cell(name, colour % COLOURS),
            *_cells(duration(sum_), f"{sum_ / (total or 1):.0%}", f"{sum_ / len(steps):.3g}"),
        ]
        for colour, (name, sum_) in enumerate(spent.items())
    ]
    rows.append(_cells("all", duration(total), "100%", f"{total / len(steps):.3g}"))
    chart = stacked_bars(steps, shares, title="Seconds per phase")
    return Card(
        "Seconds per phase",
        "of each step; other is what no phase accounts for",
        chart,
        _cells("phase", "total", "share", "s per step"),
        rows,
    )


def _reward(history: History) -> Card | None:
    points = history.series("reward/mean")
    if not points:
        return None
    std = dict(history.finite("reward/std"))
    band: Band = [(step, value - std[step], value + std[step]) for step, value in points if step in std]
    rows = [_summary(Series("mean", points))]
    rows += [[Cell(label), *_ends(history.series(name))] for name, label in _SPREADS.items() if name in history]
    note = "mean of the training rollouts; the band is one standard deviation over all samples of a step"
    return Card("Training reward", note, line_chart([Series("mean", points, band)], title="Reward"), _SUMMARY, rows)


def _components(history: History) -> Card | None:
    names = [name for name in history.names(_REWARD) if name.removeprefix(_REWARD) not in _WHOLE_REWARD]
    if not names or [history.series(name) for name in names] == [history.series("reward/mean")]:
        return None
    series = _numbered(history, names, _REWARD)
    rows = [_summary(one) for one in series]
    return Card("Reward components", "each scorer unweighted", line_chart(series, title="Components"), _SUMMARY, rows)


def _scorers(history: History, evaluation: Evaluation) -> Card | None:
    names = [*evaluation.trained, *evaluation.judges]
    if not names:
        return None
    series = _numbered(history, names, EVAL, dashed=evaluation.judges if evaluation.trained else ())
    values = [value for name in names for _, value in history.finite(name)]
    chart = line_chart(series, title="Evaluation", y_range=(0, 1) if all(0 <= value <= 1 for value in values) else None)
    note = "evaluation prompts with noise of their own"
    if evaluation.trained and evaluation.judges:
        note += "; dashed: judges that are no part of the reward"
    elif evaluation.trained:
        note += "; no judge outside of the reward watches whether it is hacked"
    warnings = [parting.message for parting in find_partings(history, evaluation) if parting.name in evaluation.judges]
    return Card("Evaluation", note, chart, *_by_step(series), warnings)


def _passes(history: History, evaluation: Evaluation) -> Card | None:
    if not evaluation.passes:
        return None
    series = _numbered(history, evaluation.passes, EVAL)
    note = (
        "chance that the best of k samples of an evaluation prompt is a success; where only pass@1 rises, training "
        "made likelier what the model could do before"
    )
    chart = line_chart(series, title="pass@k", y_range=(0, 1))
    return Card("pass@k", note, chart, *_by_step(series))


def _diversity(history: History, evaluation: Evaluation) -> Card | None:
    names = evaluation.diversity
    if not names:
        return None
    series = _numbered(history, names, EVAL)
    note = "how different samples of one prompt are: a reward can be perfect on one picture repeated"
    warnings = [parting.message for parting in find_partings(history, evaluation) if parting.name in names]
    # From zero, since what counts is the share that is kept.
    chart = line_chart(series, title="Diversity", y_range=(0, None))
    return Card("Diversity", note, chart, *_by_step(series), warnings)


def _supervised_loss(history: History) -> Card | None:
    names = [name for name in ("train/loss", "eval/loss") if name in history]
    if not names:
        return None
    series = _numbered(history, names, "", dashed=["eval/loss"])
    note = "of the supervised objective; dashed: on held-out records"
    chart = line_chart(series, title="Loss")
    return Card("Loss", _averaged(note, series[0]), chart, _SUMMARY, [_summary(one) for one in series])


def _single(history: History, name: str, title: str, note: str) -> Card:
    series = Series(name, history.series(name))
    chart = line_chart([series], title=title, small=True)
    return Card(title, _averaged(note, series), chart, _SUMMARY[1:], [_ends(series.points)])


def _averaged(note: str, series: Series) -> str:
    """The note, with word of an average where the series has more points than a chart shows."""
    count = steps_a_point(series.points)
    drawn = f"a point is the mean of {count} steps, the band their range" if count > 1 and not series.band else ""
    return "; ".join(text for text in (note, drawn) if text)


def _numbered(history: History, names: list[str], prefix: str, dashed: Sequence[str] = ()) -> list[Series]:
    return [
        Series(name.removeprefix(prefix), history.series(name), dashed=name in dashed, colour=number % COLOURS)
        for number, name in enumerate(names)
    ]


def _cells(*texts: str) -> list[Cell]:
    return [Cell(text) for text in texts]


_SUMMARY = _cells("", "first", "last", "min", "max")


def _summary(series: Series) -> list[Cell]:
    return [Cell(series.label, series.colour, series.dashed), *_ends(series.points)]


def _ends(points: Points) -> list[Cell]:
    """First, last, least and largest value."""
    finite = [value for _, value in points if math.isfinite(value)] or [math.nan]
    return _cells(*map(figure, (points[0][1], points[-1][1], min(finite), max(finite))))


def _by_step(series: Sequence[Series]) -> tuple[list[Cell], list[list[Cell]]]:
    """Header and rows of a table of the series' values, a step a row."""
    header = [Cell("step"), *(Cell(one.label, one.colour, one.dashed) for one in series)]
    columns = [dict(one.points) for one in series]
    steps = evenly(sorted({step for column in columns for step in column}), _MOST_EVALUATIONS)
    rows = [_cells(f"{s:,}", *(figure(column[s]) if s in column else "" for column in columns)) for s in steps]
    return header, rows
