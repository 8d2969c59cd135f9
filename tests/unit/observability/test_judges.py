"""Held-out judges beside the trained reward: the warning stands exactly where the gap opened."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.observability.runs import RL
from unirl.observability.flatten import flatten
from unirl.observability.history import History
from unirl.observability.judges import LARGEST_GAP, find_partings, sort_evaluation

SETTINGS = flatten(RL)


def history(**columns: list[float]) -> History:
    """Evaluations at steps 0, 10, 20, ...; double underscores stand for slashes."""
    names = {name: f"eval/{name.replace('__', '/')}" for name in columns}
    length = len(next(iter(columns.values())))
    return History([{"step": 10 * i, **{names[n]: columns[n][i] for n in columns}} for i in range(length)])


def partings(settings: dict[str, Any] = SETTINGS, **columns: list[float]) -> dict[str, int]:
    told = history(**columns)
    return {parting.name: parting.since for parting in find_partings(told, sort_evaluation(told, settings))}


def test_scorers_are_sorted_by_what_the_recipe_trains() -> None:
    told = history(svm=[1.0], knn=[1.0], digits__diversity=[1.0], digits__nearest=[1.0], reward=[2.5], invalid=[3.0])
    evaluation = sort_evaluation(told, SETTINGS)
    # A single scorer stands for the reward by itself: times its weight of 2.5 no judge could be laid beside it.
    assert evaluation.trained == ["eval/svm"]
    assert evaluation.judges == ["eval/knn"]
    assert evaluation.diversity == ["eval/digits/diversity"]
    assert evaluation.others == ["eval/digits/nearest", "eval/invalid"]


def test_of_several_scorers_the_sum_stands_for_the_reward() -> None:
    settings = {**SETTINGS, "reward.scorers.ocr.weight": 0.5}
    told = history(svm=[1.0], ocr=[1.0], reward=[3.0], knn=[1.0])
    assert sort_evaluation(told, settings).trained == ["eval/reward", "eval/svm", "eval/ocr"]


def test_a_scorer_of_negative_weight_does_not_stand_for_the_reward() -> None:
    settings = {**SETTINGS, "reward.scorers.svm.weight": -1.0}
    assert sort_evaluation(history(svm=[1.0], reward=[-1.0]), settings).trained == ["eval/reward", "eval/svm"]


def test_fine_tuning_trains_no_reward() -> None:
    settings = {"domain": "sft", "eval.reward.scorers.svm.weight": 1.0, "eval.scorers.knn.k": 5}
    evaluation = sort_evaluation(history(svm=[1.0], reward=[1.0], knn=[1.0], loss=[1.0]), settings)
    assert (evaluation.trained, evaluation.judges) == ([], ["eval/svm", "eval/reward", "eval/knn"])
    assert evaluation.others == ["eval/loss"]


@pytest.mark.parametrize(("judge", "parted"), [(0.4501, False), (0.4499, True)])
def test_a_judge_parts_when_its_gap_has_grown_by_more_than_the_limit(judge: float, parted: bool) -> None:
    assert LARGEST_GAP == 0.05
    # The reward gained 0.25, the judge stays 0.05 behind; one that was 0.25 lower all along may be 0.3 lower.
    assert partings(svm=[0.25, 0.5], knn=[0.25, judge]) == ({"eval/knn": 10} if parted else {})
    assert partings(svm=[0.5, 0.75], knn=[0.25, judge]) == ({"eval/knn": 10} if parted else {})


def test_a_gap_that_closed_again_is_no_parting_and_since_is_the_last_opening() -> None:
    assert partings(svm=[0.5, 0.7, 0.9], knn=[0.5, 0.6, 0.88]) == {}
    opened = partings(svm=[0.5, 0.7, 0.8, 0.9, 0.95], knn=[0.5, 0.6, 0.79, 0.8, 0.8])
    assert opened == {"eval/knn": 30}


def test_on_another_scale_a_judge_parts_when_it_falls_while_the_reward_rises() -> None:
    assert partings(svm=[0.5, 0.9], knn=[21.5, 21.6]) == {}
    assert partings(svm=[0.5, 0.9], knn=[21.5, 21.4]) == {"eval/knn": 10}
    assert partings(svm=[0.5, 0.4], knn=[21.5, 21.4]) == {}


@pytest.mark.parametrize(("last", "parted"), [(0.75, False), (0.749, True)])
def test_diversity_below_three_quarters_of_what_it_was_is_a_collapse(last: float, parted: bool) -> None:
    found = partings(svm=[0.5, 0.6, 0.7], digits__diversity=[1.0, 0.9, last])
    assert found == ({"eval/digits/diversity": 20} if parted else {})


def test_the_message_tells_both_gains() -> None:
    told = history(svm=[0.5, 0.95], knn=[0.5, 0.7])
    (parting,) = find_partings(told, sort_evaluation(told, SETTINGS))
    assert parting.message == (
        "knn parts from the trained reward: the trained reward went from 0.500 to 0.950 (+0.450) "
        "while knn went from 0.500 to 0.700 (+0.200)"
    )


def test_one_evaluation_or_broken_figures_compare_to_nothing() -> None:
    assert partings(svm=[0.5], knn=[0.1], digits__diversity=[0.8]) == {}
    assert partings(svm=[0.5, float("nan")], knn=[0.5, 0.1]) == {}
    assert partings(knn=[0.5, 0.1]) == {}
