"""Texts of evaluations: the file, and what a page shows of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from unirl.observability.texts import Answered, Written, compare_texts, write_texts

PROMPTS = ["What is the capital of France?", "What is 1 + 1?"]


def test_each_text_is_a_line_with_its_prompt_and_reward(tmp_path: Path) -> None:
    file = tmp_path / "eval_000000.jsonl"
    write_texts(file, PROMPTS, ["Paris", "Lyon\nor Nice", "zwei ½", "\ud800"], [1.5, 0.0, math.nan, 1.0])
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == [
        {"prompt": PROMPTS[0], "text": "Paris", "reward": 1.5},
        {"prompt": PROMPTS[0], "text": "Lyon\nor Nice", "reward": 0.0},
        {"prompt": PROMPTS[1], "text": "zwei ½", "reward": None},
        {"prompt": PROMPTS[1], "text": "?", "reward": 1.0},
    ]


def test_first_and_last_evaluation_are_laid_side_by_side(tmp_path: Path) -> None:
    for step, texts in ((0, ["Lyon", "3"]), (10, ["Nice", "2"]), (20, ["Paris", ""])):
        write_texts(tmp_path / f"eval_{step:06d}.jsonl", PROMPTS, texts, [0.5, math.nan])
    compared = compare_texts(tmp_path)
    assert compared is not None
    assert compared.steps == (0, 20)
    assert compared.left_out == 0
    assert compared.rows == [
        Answered(Written(PROMPTS[0]), [Written("Lyon", reward="0.500")], [Written("Paris", reward="0.500")]),
        Answered(Written(PROMPTS[1]), [Written("3", reward="none")], [Written("", reward="none")]),
    ]


def test_one_evaluation_has_nothing_before_it(tmp_path: Path) -> None:
    assert compare_texts(tmp_path) is None
    write_texts(tmp_path / "eval_000005.jsonl", PROMPTS, ["Lyon", "Paris", "2", "3"], [0.0, 1.0, 1.0, 0.0])
    compared = compare_texts(tmp_path)
    assert compared is not None
    assert compared.steps == (5, 5)
    assert [(row.before, len(row.after)) for row in compared.rows] == [([], 2), ([], 2)]


def test_twelve_prompts_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    prompts = [f"{number}?" for number in range(30)]
    write_texts(tmp_path / "eval_000000.jsonl", prompts, prompts, [0.0] * 30)
    compared = compare_texts(tmp_path)
    assert compared is not None
    assert [row.prompt.start for row in compared.rows][::11] == ["0?", "29?"]
    assert (len(compared.rows), compared.left_out) == (12, 18)


def test_a_long_text_folds_and_a_very_long_one_is_cut() -> None:
    assert Written.of("x" * 240) == Written("x" * 240)
    assert Written.of("x" * 250) == Written("x" * 240, "x" * 10)
    huge = Written.of("x" * 10_000)
    assert (len(huge.start), len(huge.rest), huge.left_out) == (240, 7_760, 2_000)
