"""The report's cards: which figures they show, and with which numbers."""

from __future__ import annotations

from pathlib import Path

from tests.unit.observability.runs import RL, write_run
from unirl.observability.curves import Card, main_cards, small_cards, time_card
from unirl.observability.flatten import flatten
from unirl.observability.history import History
from unirl.observability.judges import Evaluation, sort_evaluation
from unirl.observability.metrics import read

NOTHING = Evaluation([], [], [], [])


def history_of(root: Path) -> tuple[History, Evaluation]:
    history = History(read(write_run(root).metrics))
    return history, sort_evaluation(history, flatten(RL))


def rows(card: Card) -> list[list[str]]:
    return [[cell.text for cell in row] for row in card.rows]


def test_the_main_cards_are_reward_components_evaluation_and_diversity(tmp_path: Path) -> None:
    reward, components, evaluation, diversity = main_cards(*history_of(tmp_path))
    assert rows(reward) == [
        ["mean", "1.25", "2", "1.25", "2"],
        ["std, all samples", "0.500", "0.500", "0.500", "0.500"],
        ["std in a group", "0.250", "0.250", "0.250", "0.250"],
    ]
    assert rows(components) == [["svm", "0.500", "0.800", "0.500", "0.800"]]
    assert [cell.text for cell in evaluation.header] == ["step", "svm", "knn"]
    assert [cell.dashed for cell in evaluation.header] == [False, False, True]
    assert rows(evaluation) == [["0", "0.500", "0.480"], ["2", "0.750", "0.720"], ["4", "0.900", "0.875"]]
    assert rows(diversity) == [["0", "0.800"], ["2", "0.700"], ["4", "0.680"]]
    assert evaluation.warnings == diversity.warnings == []


def test_a_component_that_is_the_whole_reward_is_not_shown_twice() -> None:
    history = History([{"step": 1, "reward/mean": 0.5, "reward/svm": 0.5, "reward/max": 1.0}])
    assert [card.title for card in main_cards(history, NOTHING)] == ["Training reward"]


def test_no_figure_is_left_out_of_the_small_cards(tmp_path: Path) -> None:
    titles = [card.title for card in small_cards(*history_of(tmp_path))]
    assert titles == [
        "KL to the reference",
        "Ratio deviation",
        "Clip fraction",
        "Constant groups",
        "Loss",
        "Gradient norm",
        "Learning rate",
    ]
    history = History([{"step": 1, "reward/mean": 0.5, "train/quality": 0.5, "train/skipped": 1.0, "eval/fd": 3.0}])
    evaluation = Evaluation([], [], [], ["eval/fd"])
    assert [card.title for card in small_cards(history, evaluation)] == ["train/quality", "train/skipped", "eval/fd"]


def test_fine_tuning_shows_its_loss_beside_that_of_held_out_records() -> None:
    history = History([{"step": 1, "train/loss": 0.5, "eval/loss": 0.75}, {"step": 2, "train/loss": 0.25}])
    (card,) = main_cards(history, NOTHING)
    assert rows(card) == [
        ["train/loss", "0.500", "0.250", "0.250", "0.500"],
        ["eval/loss", "0.750", "0.750", "0.750", "0.750"],
    ]
    assert small_cards(history, NOTHING) == []


def test_the_time_of_a_step_is_shared_out_among_its_phases(tmp_path: Path) -> None:
    card = time_card(history_of(tmp_path)[0])
    assert card is not None
    assert rows(card) == [
        ["rollout", "0:01", "25%", "0.25"],
        ["train", "0:02", "50%", "0.5"],
        ["other", "0:01", "25%", "0.25"],
        ["all", "0:04", "100%", "1"],
    ]
    assert time_card(History([{"step": 1, "train/loss": 0.5}])) is None
