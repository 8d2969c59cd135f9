"""Health checks: each limit from both sides."""

from __future__ import annotations

import math

import pytest

from unirl.observability.health import check_health
from unirl.observability.history import History
from unirl.observability.judges import Evaluation

NOTHING = Evaluation([], [], [], [])


def states(**columns: list[float]) -> dict[str, str]:
    """Verdict by topic; in names of metrics, double underscores stand for slashes."""
    length = len(next(iter(columns.values())))
    rows = [{n.replace("__", "/"): columns[n][i] for n in columns} for i in range(length)]
    lines = [{"step": i + 1, **row} for i, row in enumerate(rows)]
    return {check.topic: check.state for check in check_health(History(lines), NOTHING)}


@pytest.mark.parametrize(
    ("metric", "topic", "good", "bad"),
    [
        ("train__ratio_deviation", "ratio deviation", [0.2, 1.0], [1.1, 0.1]),
        ("train__clip_fraction", "clip fraction", [1.0] * 9 + [0.95], [0.0] * 9 + [0.96]),
        ("advantage__constant_groups", "constant groups", [1.0] * 9 + [0.5], [0.0] * 9 + [0.6]),
        ("train__skipped", "skipped steps", [0.0, 0.0], [0.0, 1.0, 0.0]),
        ("reward__invalid", "invalid samples", [0.0], [2.0, 0.0]),
        ("eval__invalid", "invalid evaluation samples", [0.0], [math.nan, 7.0]),
        ("train__entropy", "entropy", [2.0, 0.2], [2.0, 0.19]),
        ("rollout__truncated", "truncated responses", [1.0] * 9 + [0.5], [0.0] * 9 + [0.6]),
    ],
)
def test_every_limit_holds_from_both_sides(metric: str, topic: str, good: list[float], bad: list[float]) -> None:
    assert states(**{metric: good})[topic] == "ok"
    assert states(**{metric: bad})[topic] == "warn"


def test_replay_is_judged_by_its_worst_step_of_a_trajectory_and_by_the_mean_over_tokens() -> None:
    """Steps of flow models are clipped at 1e-5; of tokens a few differ much in half precision."""
    for gaps, state in (([0.0, 1e-5], "ok"), ([0.0, 2e-5, 0.0], "warn")):
        assert states(train__rollout_gap=[0.0] * len(gaps), train__rollout_gap_max=gaps)["replay"] == state
    for gaps, state in (([0.0, 0.05], "ok"), ([0.0, 0.06, 0.0], "warn")):
        long = {"rollout__tokens": [9.0] * len(gaps), "train__rollout_gap_max": [0.5] * len(gaps)}
        assert states(train__rollout_gap=gaps, **long)["replay"] == state


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_warns_and_never_passes_a_limit(broken: float) -> None:
    gap = [0.0, broken]
    found = states(train__rollout_gap=gap, train__rollout_gap_max=gap, train__kl=[0.1, broken])
    assert found == {"replay": "warn", "numbers that are not finite": "warn", "KL": "info"}


@pytest.mark.parametrize(
    ("tokens", "reward", "state"),
    [([10, 21], [0.5, 0.6], "warn"), ([10, 20], [0.5, 0.6], "ok"), ([10, 21], [0.5, 0.5], "ok")],
)
def test_responses_that_grow_past_double_warn_where_the_reward_rose(
    tokens: list[float], reward: list[float], state: str
) -> None:
    assert states(rollout__tokens=tokens, reward__mean=reward)["response length"] == state


def test_checks_without_their_metric_are_left_out() -> None:
    assert states(train__loss=[0.5]) == {"numbers that are not finite": "ok"}
    assert check_health(History([]), NOTHING) == []


def test_warnings_come_first_and_tell_their_number() -> None:
    lines = [{"step": 1, "train/kl": 0.25, "train/skipped": 2.0, "train/ratio_deviation": 0.125}]
    checks = check_health(History(lines), NOTHING)
    assert [(check.topic, check.value) for check in checks] == [
        ("skipped steps", "2"),
        ("ratio deviation", "0.125"),
        ("KL", "0.250"),
        ("numbers that are not finite", "none"),
    ]
