"""Prompts of a suite: a line each, with the skill that the prompt asks for, or with one for each question about it.

    {"prompt": "a red circle", "skill": "circle"}
    {"prompt": "two cats", "vqa_list": [["How many cats are in the image?", "two"]], "skills": ["count"]}

The second is the format of GenEval 2. What else a line holds (answers, targets) is for the scorers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
from pathlib import Path
from typing import Any

from unirl.config.error import nearest
from unirl.data.lines import accepted, read_lines
from unirl.data.prompts import PromptRow, json_row

ALL = "all"  # stands in a table beside the skills
QUESTIONS, SKILL, SKILLS = "vqa_list", "skill", "skills"
_NAME = re.compile(r"[\w-]+( [\w-]+)*")


@dataclasses.dataclass(frozen=True)
class SuitePrompts:
    """The lines of `path`, all of them well formed: row i is line i + 1."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"there is no file of prompts {self.path}")

    @classmethod
    def named(cls, name: str, folder: Path) -> SuitePrompts:
        """A `.jsonl` file, relative to `folder`, or the name of prompts that are shipped."""
        if name.endswith(".jsonl"):
            return cls(folder / name)
        shipped = Path(str(importlib.resources.files("unirl.data") / "suites"))
        known = sorted(path.stem for path in shipped.glob("*.jsonl"))
        if name not in known:
            raise ValueError(
                f"prompts: {name!r} is neither a .jsonl file nor a name of shipped ones; {nearest(name, known)}"
            )
        return cls(shipped / f"{name}.jsonl")

    @functools.cached_property
    def rows(self) -> tuple[PromptRow, ...]:
        """In file order. ValueError with path and line for what is malformed."""
        rows, problems = read_lines(self.path, functools.partial(_suite_row, self.path.parent))
        return accepted(self.path, rows, problems, 0.0, "prompt")


def skill_of(row: PromptRow) -> str | None:
    """The skill of a prompt as a whole."""
    return row.metadata.get(SKILL)


def answer_skills(row: PromptRow) -> list[str]:
    """The skill of each question about a prompt; empty where they have none of their own."""
    return row.metadata.get(SKILLS, [])


def _suite_row(folder: Path, line: str) -> PromptRow:
    row = json_row(folder, line)
    given = row.metadata
    if SKILL not in given and SKILLS not in given:
        raise ValueError(
            f"the row has neither a {SKILL!r} nor {SKILLS!r} of its questions (keys: {['prompt', *given]})"
        )
    if SKILL in given:
        _check_name(given[SKILL])
    if SKILLS in given:
        _check_skills(given[SKILLS], given.get(QUESTIONS))
    return row


def _check_skills(skills: Any, questions: Any) -> None:
    if not isinstance(skills, list) or not isinstance(questions, list) or len(skills) != len(questions):
        raise ValueError(f"{SKILLS!r} must name a skill for each question of {QUESTIONS!r} (got {skills!r})")
    for name in skills:
        _check_name(name)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == ALL:
        raise ValueError(f"a skill is a name such as 'count', of letters and digits, and not {ALL!r} (got {name!r})")
