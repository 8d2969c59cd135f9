"""An evaluation by a suite tells what the same scorers say of the same samples, put together by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import SMALL, SMALL_LANGUAGE
from tests.unit.reward.http.live import live, remote
from tests.unit.reward.scorers.vision import write_model
from unirl.config.error import ConfigError
from unirl.config.load import load
from unirl.data.prompts import PromptRow, as_roots
from unirl.observability.skills import Tally
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.scorers.exact_match import ExactMatch
from unirl.reward.scorers.geneval2 import GenEval2, geometric_mean
from unirl.reward.scorers.jpeg import JpegCompressibility
from unirl.reward.service import RewardConfig, WeightedScorer, scorer_inputs
from unirl.reward.version import version_of
from unirl.trainer.restore import untrained
from unirl.trainer.suite import Suite
from unirl.trainer.suite_evaluation import Asked, SuiteEvaluation, evaluate
from unirl.trainer.suite_folder import write
from unirl.types.sample import Sample
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.seed import derive_seed

DIGITS = Asked("diffusion/digits", (*SMALL, "sampling.steps=2", "data.prompts_per_step=2", "data.samples_per_prompt=2"))
TINY = Asked("diffusion/tiny_sana", ("sampling.steps=2",), number=2)
WORDS = ("zero", "one", "two", "three")


@dataclasses.dataclass(frozen=True)
class Level(Scorer):
    """The grey level; `refused` are the prompts without a score, of which "raise" raises."""

    refused: tuple[str, ...] = ()

    def score(self, samples: list[ScorerInput]) -> list[float]:
        for sample in samples:
            if sample.metadata.get("raises"):
                raise ValueError("this prompt raises")
        levels = [float(sample.picture.mean()) / 255 for sample in samples]
        return [
            math.nan if sample.prompt in self.refused else level for sample, level in zip(samples, levels, strict=True)
        ]


def suite_of(rows: list[PromptRow], **scorers: Scorer | WeightedScorer) -> Suite:
    weighted = {name: one if isinstance(one, WeightedScorer) else WeightedScorer(one) for name, one in scorers.items()}
    return Suite("own", tuple(rows), RewardConfig(weighted), 2, "")


def digit_rows(**metadata: Any) -> list[PromptRow]:
    skills = ("low", "low", "high", "high")
    return [
        PromptRow(f"a handwritten {word}", {"skill": skill, **metadata})
        for word, skill in zip(WORDS, skills, strict=True)
    ]


def line(found: SuiteEvaluation, figure: str, skill: str) -> Tally:
    (one,) = [one for one in found.tallies() if (one.figure, one.skill) == (figure, skill)]
    return one


def by_hand(asked: Asked, rows: list[PromptRow], number: int) -> Sample:
    """The same samples without a suite: two prompts at a time."""
    with untrained(asked.model, asked.overrides) as found:
        sampling = found.config.sampling
        assert isinstance(sampling, DiffusionSamplingParams)
        ode = dataclasses.replace(sampling.deterministic(), seed=derive_seed(asked.seed, "suite"))
        engine = found.sampler(None)
        return Sample.concat(
            [
                engine.generate(Sample((as_roots(rows[first : first + 2], 0, first=first),)).fork(number, ode))
                for first in range(0, len(rows), 2)
            ]
        )


def test_the_numbers_are_those_of_scoring_the_same_samples_by_hand() -> None:
    rows = digit_rows()
    found = evaluate(DIGITS, suite_of(rows, level=Level()))
    levels = Level().score(scorer_inputs(by_hand(DIGITS, rows, 2)))
    levels = torch.tensor(levels).tolist()  # as float32, like all scores
    assert [sample.scores["level"] for sample in found.samples] == levels
    assert len(set(levels)) == 8
    assert [one.skill for one in found.tallies()] == ["low", "high", "all"]
    assert line(found, "level", "low").mean == pytest.approx(statistics.fmean(levels[:4]), rel=1e-12)
    high = line(found, "level", "high")
    assert high.mean == pytest.approx(statistics.fmean(levels[4:]), rel=1e-12)
    means = [statistics.fmean(levels[4:6]), statistics.fmean(levels[6:])]
    assert high.error == pytest.approx(statistics.stdev(means) / math.sqrt(2), rel=1e-9)
    assert line(found, "level", "all").n == 8


def test_what_cannot_be_scored_is_counted_apart_and_never_0() -> None:
    rows = digit_rows()
    rows[3] = PromptRow(rows[3].prompt, {"skill": "high", "raises": True})
    found = evaluate(DIGITS, suite_of(rows, level=Level(("a handwritten zero",))))
    whole = evaluate(DIGITS, suite_of(digit_rows(), level=Level()))
    kept = [sample.scores["level"] for sample in whole.samples[2:6]]
    everything = line(found, "level", "all")
    assert (everything.n, everything.invalid) == (4, 4)
    assert everything.mean == pytest.approx(statistics.fmean(kept), rel=1e-12)
    assert [line(found, "level", skill).invalid for skill in ("low", "high")] == [2, 2]
    assert found.samples[7].cause == "level: r0.p3/1: ValueError: this prompt raises"


def test_where_nothing_can_be_scored_the_first_cause_is_told() -> None:
    with pytest.raises(ConfigError, match=r"none of 8 samples has a score; first cause: level: .*this prompt raises"):
        evaluate(DIGITS, suite_of(digit_rows(raises=True), level=Level()))


def test_several_scorers_are_figures_and_so_is_their_weighted_sum() -> None:
    scorers = {"level": WeightedScorer(Level(), weight=2.0), "size": WeightedScorer(JpegCompressibility())}
    logged = {"logged": WeightedScorer(Level(), required=False)}
    found = evaluate(DIGITS, suite_of(digit_rows(), **scorers, **logged))
    assert list(found.samples[0].scores) == ["reward", "level", "size", "logged"]
    for sample in found.samples:
        total = 2 * sample.scores["level"] + sample.scores["size"]
        assert sample.scores["reward"] == pytest.approx(total, rel=1e-6)
    alone = evaluate(DIGITS, suite_of(digit_rows(), level=Level(), **logged))
    assert list(alone.samples[0].scores) == ["level", "logged"]


def test_a_scorer_for_some_skills_is_told_over_their_samples_and_the_sum_over_all() -> None:
    low = WeightedScorer(Level(), when={"skill": "low"})
    found = evaluate(DIGITS, suite_of(digit_rows(), low=low, size=WeightedScorer(JpegCompressibility())))
    assert [(one.skill, one.n, one.invalid) for one in found.tallies() if one.figure == "low"] == [
        ("low", 4, 0),
        ("all", 4, 0),
    ]
    assert [one.n for one in found.tallies() if one.figure == "reward"] == [4, 4, 8]
    for sample in found.samples:
        assert sample.scores["reward"] == pytest.approx(
            sum(sample.scores[name] for name in sample.scores) / 2, rel=1e-6
        )


def test_seed_number_and_batch_do_what_they_say() -> None:
    suite = suite_of(digit_rows(), level=Level())
    values = [sample.scores["level"] for sample in evaluate(DIGITS, suite).samples]
    assert [sample.scores["level"] for sample in evaluate(DIGITS, suite).samples] == values
    other = evaluate(dataclasses.replace(DIGITS, seed=1), suite)
    assert not {sample.scores["level"] for sample in other.samples} & set(values)
    more = evaluate(dataclasses.replace(DIGITS, number=3), suite)
    assert [sample.id for sample in more.samples][:4] == ["r0.p0/0", "r0.p0/1", "r0.p0/2", "r0.p1/0"]
    one_by_one = dataclasses.replace(DIGITS, overrides=(*DIGITS.overrides, "rollout.batch_size=1"))
    assert [sample.scores["level"] for sample in evaluate(one_by_one, suite).samples] == pytest.approx(values, abs=1e-2)


def test_a_served_scorer_gives_the_numbers_of_the_local_one_and_its_version(tmp_path: Path) -> None:
    local = evaluate(DIGITS, suite_of(digit_rows(), size=JpegCompressibility()))
    with live({"jpeg": JpegCompressibility()}) as url:
        over = evaluate(DIGITS, suite_of(digit_rows(), size=remote(url, "jpeg")))
        write(DIGITS, over, tmp_path)
    assert over.tallies() == local.tallies()
    said = json.loads((tmp_path / "evaluation.json").read_text())
    assert said["scorers"]["size"]["version"] == version_of(JpegCompressibility())


def test_a_scorer_under_a_time_limit_gives_the_same_numbers_and_ends_with_the_evaluation() -> None:
    before = multiprocessing.active_children()
    free = evaluate(DIGITS, suite_of(digit_rows(), size=JpegCompressibility()))
    limited = evaluate(DIGITS, suite_of(digit_rows(), size=WeightedScorer(JpegCompressibility(), time_limit=60.0)))
    assert limited.tallies() == free.tallies()
    assert multiprocessing.active_children() == before


def test_a_language_model_is_evaluated_the_same_way(tmp_path: Path) -> None:
    asked = Asked("ar/sort", (*SMALL_LANGUAGE, "sampling.max_new_tokens=4"))
    rows = [PromptRow("sort 31415:", {"skill": "short", "answer": "11345"})]
    found = evaluate(asked, suite_of(rows, exact=ExactMatch()))
    assert [sample.text is None for sample in found.samples] == [False, False]
    write(asked, found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    copies = dataclasses.replace(asked, overrides=(*asked.overrides, "eval.temperature=0", "eval.samples_per_prompt=1"))
    with pytest.raises(
        ConfigError, match="2 samples of a prompt at temperature 0 are copies of one text: take --number 1"
    ):
        evaluate(copies, suite_of(rows, exact=ExactMatch()))


# --- GenEval 2 ---

CATS = [["How many cats are in the image?", "two"], ["Is the cat on the left of the box?", "Yes"]]
DOG = [["Are there any dogs in the image?", "Yes"], ["Is the dog red?", "Yes"], ["How many dogs are there?", "one"]]
ROWS = [
    PromptRow("two cats left of a box", {"vqa_list": CATS, "skills": ["count", "position"]}),
    PromptRow("a red dog", {"vqa_list": DOG, "skills": ["object", "attribute", "count"]}),
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> GenEval2:
    folder = write_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return GenEval2(checkpoint=str(folder), dtype="float32", device="cpu")


def test_geneval2_is_told_by_prompt_in_both_means_and_by_skill_of_its_answers(judge: GenEval2, tmp_path: Path) -> None:
    found = evaluate(TINY, suite_of(ROWS, geneval2=judge))
    answers = judge.probabilities(scorer_inputs(by_hand(TINY, ROWS, 2)))
    assert [sample.answers["geneval2"] for sample in found.samples] == answers
    assert [len(own) for own in answers] == [2, 2, 3, 3]
    arithmetic, geometric = line(found, "geneval2/arithmetic", "all"), line(found, "geneval2/geometric", "all")
    assert arithmetic.mean == pytest.approx(statistics.fmean(map(statistics.fmean, answers)), rel=1e-12)
    assert geometric.mean == pytest.approx(statistics.fmean(map(geometric_mean, answers)), rel=1e-12)
    count = line(found, "geneval2/answers", "count")
    pooled = [answers[0][0], answers[1][0], answers[2][2], answers[3][2]]
    assert (count.mean, count.n) == (pytest.approx(statistics.fmean(pooled), rel=1e-12), 4)
    expected = ["count", "position", "object", "attribute"]
    assert [one.skill for one in found.tallies() if one.figure == "geneval2/answers"] == expected
    write(TINY, found, tmp_path)
    said = json.loads((tmp_path / "evaluation.json").read_text())
    assert said["prompts"][1]["samples"][0]["answers"]["geneval2"] == answers[2]
    assert said["scorers"]["geneval2"]["version"] == judge.version()
    assert load(GenEval2, {k: v for k, v in said["scorers"]["geneval2"]["scorer"].items() if k != "_target_"}) == judge


def test_a_picture_that_cannot_be_asked_about_makes_each_of_its_answers_invalid(judge: GenEval2) -> None:
    endless = [[f"Is there {'a very ' * 2000}large cat in the image?", "Yes"], DOG[0]]
    rows = [PromptRow("a cat", {"vqa_list": endless, "skills": ["object", "object"]}), ROWS[1]]
    found = evaluate(TINY, suite_of(rows, geneval2=judge))
    assert [(one.n, one.invalid) for one in found.tallies() if one.skill == "all"] == [(2, 2), (2, 2)]
    seen = line(found, "geneval2/answers", "object")
    assert (seen.n, seen.invalid) == (2, 4)
    assert "tokens, the model reads 2048" in found.samples[0].cause


def test_under_a_time_limit_its_answers_are_not_told_one_by_one(judge: GenEval2) -> None:
    limited = suite_of(ROWS, geneval2=WeightedScorer(judge, time_limit=60.0))
    assert limited.answering == {}
