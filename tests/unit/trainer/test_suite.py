from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unirl.config.error import ConfigError
from unirl.data.suite_prompts import answer_skills, skill_of
from unirl.reward.scorers.geneval2 import GenEval2
from unirl.reward.scorers.jpeg import JpegCompressibility
from unirl.trainer.suite import load_suite, shipped_suites

OFFICIAL = {"prompt": "two cats", "atom_count": 1, "vqa_list": [["How many cats are in the image?", "two"]]}
JPEG = "reward: {scorers: {size: {scorer: {_target_: unirl.reward.scorers.jpeg.JpegCompressibility}}}}\n"


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def refusal(name: str | Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_suite(str(name))
    return str(refused.value)


def test_every_shipped_suite_loads_and_no_prompt_stands_twice() -> None:
    counts = {}
    for name in shipped_suites():
        suite = load_suite(name)
        assert suite.name == name
        assert len({row.prompt for row in suite.rows}) == len(suite.rows)
        counts[name] = len(suite.rows)
    assert counts == {"basics": 60, "digits": 10, "shapes": 24, "sort": 40}


def test_the_basics_ask_fifteen_prompts_of_each_skill_and_judge_each_skill() -> None:
    suite = load_suite("basics")
    skills = [skill_of(row) for row in suite.rows]
    assert {skill: skills.count(skill) for skill in skills} == dict.fromkeys(
        ("colour", "count", "position", "text"), 15
    )
    assert all(skill_of(row) in answer_skills(row) for row in suite.rows)
    assert [type(scorer) for scorer in suite.answering.values()] == [GenEval2]


def test_the_official_file_loads_as_it_is(tmp_path: Path) -> None:
    suite = load_suite(lines(tmp_path / "geneval2_data.jsonl", OFFICIAL | {"skills": ["count"]}))
    assert (suite.name, suite.samples_per_prompt) == ("geneval2_data", 1)
    assert suite.answering == {"geneval2": GenEval2()}
    assert answer_skills(suite.rows[0]) == ["count"]


def test_a_suite_of_one_s_own_names_its_prompts_and_scorers(tmp_path: Path) -> None:
    lines(tmp_path / "own.jsonl", {"prompt": "a red circle", "skill": "red"})
    (tmp_path / "own.yaml").write_text(f"prompts: own.jsonl\n{JPEG}samples_per_prompt: 3\n")
    suite = load_suite(str(tmp_path / "own.yaml"))
    assert (suite.name, suite.samples_per_prompt, suite.rows[0].prompt) == ("own", 3, "a red circle")
    assert suite.reward.scorers["size"].scorer == JpegCompressibility()
    assert suite.answering == {}


def test_a_suite_of_one_s_own_may_change_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("defaults: [suite/digits, _self_]\nsamples_per_prompt: 2\n")
    suite = load_suite(str(tmp_path / "few.yaml"))
    assert suite.rows == load_suite("digits").rows
    assert (list(suite.reward.scorers), suite.samples_per_prompt) == (["knn", "forest"], 2)


def test_a_malformed_question_is_named_by_its_line(tmp_path: Path) -> None:
    good = OFFICIAL | {"skills": ["count"]}
    path = lines(tmp_path / "a.jsonl", good, good | {"vqa_list": [["How many cats are in the image?", "2"]]})
    assert refusal(path).startswith(f"{path}:2: the answer to a question must be Yes or one of one, two")
    path = lines(tmp_path / "b.jsonl", good | {"vqa_list": ["How many?"]})
    assert refusal(path).startswith(f"{path}:1: the row: a question must read [question, answer]")
    path = lines(tmp_path / "c.jsonl", good, good, good | {"vqa_list": [], "skills": []})
    assert refusal(path).startswith(f"{path}:3: the prompt 'two cats' has no questions")
    path = lines(tmp_path / "d.jsonl", good, {"prompt": "a dog", "skill": "object"})
    assert refusal(path).startswith(f"{path}:2: the row has no 'vqa_list', which GenEval 2 needs; for other scorers")


def test_all_lines_that_are_malformed_are_told_at_once(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "x"}, OFFICIAL | {"skill": "count"}, {"skill": "count"})
    told = refusal(path).splitlines()
    assert [line.split(": ")[0] for line in told[:2]] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (f"prompts: own.jsonl\n{JPEG}number: 3\n", "number: unknown key of SuiteConfig"),
        (f"prompts: own.jsonl\n{JPEG}samples_per_prompt: 0\n", "samples_per_prompt must be at least 1, got 0"),
        (f"prompts: other.jsonl\n{JPEG}", "there is no file of prompts"),
        (f"prompts: own\n{JPEG}", "prompts: 'own' is neither a .jsonl file nor a name of shipped ones; known: basics"),
        (f"prompts: own.jsonl\n{JPEG[:-2]}, max_invalid: 0.5}}\n", "max_invalid=0.5 would have no effect"),
        ("prompts: own.jsonl\n", "reward: missing"),
    ],
)
def test_a_malformed_suite_is_refused(tmp_path: Path, content: str, told: str) -> None:
    lines(tmp_path / "own.jsonl", {"prompt": "a red circle", "skill": "red"})
    (tmp_path / "own.yaml").write_text(content)
    assert told in refusal(tmp_path / "own.yaml")


def test_an_unknown_suite_is_told_with_the_nearest(tmp_path: Path) -> None:
    assert "suite shape: neither a shipped one nor a file (.yaml, .jsonl) that is there; did you mean" in refusal(
        "shape"
    )
    assert "there is no file of prompts" in refusal(tmp_path / "none.jsonl")
    assert "neither a shipped one nor a file" in refusal(tmp_path / "none.yaml")
