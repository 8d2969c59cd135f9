"""A suite: prompts, each with a skill, and the scorers that judge what a model makes of them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
from pathlib import Path

from unirl.config.compose import compose
from unirl.config.error import ConfigError, nearest, refusals
from unirl.config.load import load
from unirl.config.recipes import PACKAGE
from unirl.data.prompts import PromptRow
from unirl.data.suite_prompts import QUESTIONS, SuitePrompts, answer_skills
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.geneval2 import GenEval2
from unirl.reward.service import RewardConfig, WeightedScorer


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
    """A suite's YAML file.

    prompts:            a `.jsonl` file beside it (data/suite_prompts.py), or the name of prompts that are shipped
    reward:             the scorers: each is a figure, and so is their weighted sum where several count. Invalid samples
                        are counted and never stop an evaluation: max_invalid has to stay 0
    samples_per_prompt: samples of each
    """

    prompts: str
    reward: RewardConfig
    samples_per_prompt: int = 4

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {self.samples_per_prompt}")
        if self.reward.max_invalid:
            raise ValueError(
                f"reward.max_invalid={self.reward.max_invalid:g} would have no effect: a suite counts invalid samples "
                "and goes on; leave it out"
            )


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite with its prompts. digest: of the file of prompts"""

    name: str
    rows: tuple[PromptRow, ...]
    reward: RewardConfig
    samples_per_prompt: int
    digest: str

    @property
    def answering(self) -> dict[str, GenEval2]:
        """The scorers in this process whose answers can be told one by one."""
        return {
            name: weighted.scorer
            for name, weighted in self.reward.scorers.items()
            if isinstance(weighted.scorer, GenEval2) and weighted.limit is None
        }


def shipped_suites() -> list[str]:
    """Names such as `digits`."""
    return sorted(path.stem for path in _shipped().glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """A shipped suite by its name, a suite's YAML file, or GenEval 2's own JSONL file, which GenEval 2 judges.

    ConfigError for what is none of these, and for what is malformed, with the file and the line.
    """
    with refusals():
        if name.endswith(".jsonl"):
            return _geneval2(Path(name))
        path = Path(name) if name.endswith(".yaml") else _shipped() / f"{name}.yaml"
        if not path.is_file():
            known = nearest(name, shipped_suites())
            raise ConfigError(f"suite {name}: neither a shipped one nor a file (.yaml, .jsonl) that is there; {known}")
        config = load(SuiteConfig, compose(str(path), []))
        prompts = SuitePrompts.named(config.prompts, path.parent)
        return _checked(path.stem, prompts, config.reward, config.samples_per_prompt)


def _shipped() -> Path:
    return Path(str(importlib.resources.files(PACKAGE) / "suite"))


def _geneval2(path: Path) -> Suite:
    prompts = SuitePrompts(path)
    without = [number for number, row in enumerate(prompts.rows, 1) if QUESTIONS not in row.metadata]
    if without:
        raise ValueError(
            f"{path}:{without[0]}: the row has no {QUESTIONS!r}, which GenEval 2 needs; for other scorers name this "
            "file in the YAML file of a suite: docs/evaluate.md"
        )
    return _checked(path.stem, prompts, RewardConfig({"geneval2": WeightedScorer(GenEval2())}), 1)


def _checked(name: str, prompts: SuitePrompts, reward: RewardConfig, samples_per_prompt: int) -> Suite:
    """ValueError for prompts and scorers that do not fit each other, and for a question that is malformed, or that has
    no skill where others of its row have one.
    """
    reward.refuse_unscored(prompts.rows)
    reward.refuse_idle(prompts.rows)
    digest = hashlib.sha256(prompts.path.read_bytes()).hexdigest()
    suite = Suite(name, prompts.rows, reward, samples_per_prompt, digest)
    for name, scorer in suite.answering.items():
        for number, row in enumerate(suite.rows, 1):
            if reward.scorers[name].applies(row.metadata):
                _check_questions(scorer, row, f"{prompts.path}:{number}")
    return suite


def _check_questions(scorer: GenEval2, row: PromptRow, place: str) -> None:
    try:
        asked = scorer.questions(ScorerInput(id="the row", prompt=row.prompt, metadata=row.metadata))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    skills = answer_skills(row)
    if skills and len(skills) != len(asked):
        raise ValueError(
            f"{place}: the row names {len(skills)} skills for the {len(asked)} questions in {scorer.questions_key!r}"
        )
