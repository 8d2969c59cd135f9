from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unirl.data.suite_prompts import SuitePrompts, answer_skills, skill_of

QUESTIONS = [["How many cats are in the image?", "two"], ["Are there any cats in the image?", "Yes"]]


def written(folder: Path, *lines: str | dict[str, Any]) -> SuitePrompts:
    path = folder / "suite.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return SuitePrompts(path)


def refusal(folder: Path, *lines: str | dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        _ = written(folder, *lines).rows
    return str(refused.value)


def test_a_prompt_has_a_skill_or_its_questions_have_one_each(tmp_path: Path) -> None:
    whole, by_question = written(
        tmp_path,
        {"prompt": "a red circle", "skill": "circle", "colour": "red"},
        {"prompt": "two cats", "atom_count": 1, "vqa_list": QUESTIONS, "skills": ["count", "object"]},
    ).rows
    assert (skill_of(whole), answer_skills(whole), whole.metadata["colour"]) == ("circle", [], "red")
    assert (skill_of(by_question), answer_skills(by_question)) == (None, ["count", "object"])
    assert by_question.metadata["vqa_list"] == QUESTIONS


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"prompt": "x"}, "the row has neither a 'skill' nor 'skills' of its questions (keys: ['prompt'])"),
        ({"prompt": "x", "skil": "count"}, "(keys: ['prompt', 'skil'])"),
        (
            {"prompt": "x", "skill": 3},
            "a skill is a name such as 'count', of letters and digits, and not 'all' (got 3)",
        ),
        ({"prompt": "x", "skill": "all"}, "(got 'all')"),
        ({"prompt": "x", "skill": "a/b"}, "(got 'a/b')"),
        ({"prompt": "x", "skills": ["count"]}, "'skills' must name a skill for each question of 'vqa_list'"),
        ({"prompt": "x", "skills": ["count"], "vqa_list": QUESTIONS}, "(got ['count'])"),
        ({"prompt": "x", "skills": ["count", ""], "vqa_list": QUESTIONS}, "(got '')"),
        ({"prompt": " ", "skill": "count"}, "the prompt is empty"),
        ({"skill": "count"}, "the row has no 'prompt'"),
        ("", "the line is blank"),
        ('{"prompt": "x", "skill": "a", "skill": "b"}', "a key stands twice"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str | dict[str, Any], told: str) -> None:
    said = refusal(tmp_path, {"prompt": "good", "skill": "count"}, line)
    assert said.startswith(f"{tmp_path / 'suite.jsonl'}:2: ")
    assert told in said


def test_prompts_are_a_file_beside_the_suite_or_shipped(tmp_path: Path) -> None:
    beside = written(tmp_path, {"prompt": "good", "skill": "count"})
    assert SuitePrompts.named("suite.jsonl", tmp_path) == beside
    assert len(SuitePrompts.named("digits", tmp_path).rows) == 10
    with pytest.raises(ValueError, match=r"no file of prompts .*other\.jsonl"):
        SuitePrompts.named("other.jsonl", tmp_path)
    with pytest.raises(
        ValueError, match=r"'digit' is neither a \.jsonl file nor a name of shipped ones; did you mean digits\?"
    ):
        SuitePrompts.named("digit", tmp_path)
