"""A run whose scorers are each for some of the prompts, and what is refused before it starts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_language_policy import SMALL_LM, WRITING
from unirl.algorithms.grpo import GRPO
from unirl.data.prompts import PromptRow, PromptSource
from unirl.observability.metrics import read
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, WeightedScorer
from unirl.train.backend.config import ARBackendConfig
from unirl.trainer.ar import ARConfig, ARTrainConfig, ARTrainer
from unirl.trainer.rl import AdvantageConfig, DataConfig
from unirl.trainer.run import LoggingConfig, RunConfig
from unirl.trainer.text_evaluation import TextEvalConfig


@dataclasses.dataclass(frozen=True)
class Rows(PromptSource):
    """Prompts with their metadata."""

    given: tuple[PromptRow, ...]

    def rows(self) -> tuple[PromptRow, ...]:
        return self.given


@dataclasses.dataclass(frozen=True)
class Share(Scorer):
    """Of the characters of a response, how many are `of`; it refuses prompts that are not marked `of`."""

    of: str

    def score(self, samples: list[ScorerInput]) -> list[float]:
        assert all(sample.metadata["wants"] == self.of for sample in samples)
        return [sample.written.count(self.of) / max(len(sample.written), 1) for sample in samples]


@dataclasses.dataclass(frozen=True)
class Characters(Scorer):
    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [float(len(sample.written)) for sample in samples]


ROWS = tuple(PromptRow(prompt, {"wants": wants}) for prompt, wants in (("12", "9"), ("3a0", "a"), ("7", "9")))
REWARD = RewardConfig(
    {
        "nines": WeightedScorer(Share("9"), when={"wants": "9"}),
        "letters": WeightedScorer(Share("a"), weight=2.0, when={"wants": "a"}),
        "length": WeightedScorer(Characters(), weight=0.01),
    }
)


def config(output: Path, **settings: Any) -> ARConfig:
    plain = {
        "run": RunConfig("run", steps=6, seed=3, output=output),
        "model": SMALL_LM,
        "data": DataConfig(Rows(ROWS), prompts_per_step=1, samples_per_prompt=4),
        "sampling": WRITING,
        "reward": REWARD,
        "algorithm": GRPO(),
        "train": ARTrainConfig(ARBackendConfig()),
        "advantage": AdvantageConfig(combine="per_component"),
        "logging": LoggingConfig(trackers=()),
    }
    return ARConfig(**{**plain, **settings})


def test_each_step_has_figures_of_the_scorers_of_its_prompts(tmp_path: Path) -> None:
    ARTrainer(config(tmp_path, eval=TextEvalConfig(Rows(ROWS[:1]), every=6))).fit()
    steps = read(tmp_path / "run" / "metrics.jsonl")
    names = [{"nines", "letters", "length"} & {name.removeprefix("reward/") for name in step} for step in steps[1:]]
    assert sorted(map(len, names)) == [2] * 6
    assert all("length" in found for found in names)
    assert [sum(scorer in found for found in names) for scorer in ("nines", "letters")] == [4, 2]
    for step in steps[1:]:
        nines, letters = step.get("reward/nines", 0.0), step.get("reward/letters", 0.0)
        assert step["reward/mean"] == pytest.approx(nines + 2 * letters + 0.01 * step["reward/length"], abs=1e-6)
        assert step["reward/invalid"] == 0
    assert {name for name in steps[0] if name.startswith("eval/")} == {"eval/reward", "eval/nines", "eval/length"}
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert json.dumps(steps)


PARTS = RewardConfig({name: REWARD.scorers[name] for name in ("nines", "letters")})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"reward": RewardConfig({"nines": REWARD.scorers["nines"]})},
            r"no scorer that counts in the reward applies to the prompt '3a0' with metadata \{'wants': 'a'\}",
        ),
        (
            {"data": DataConfig(Rows(ROWS[::2]), prompts_per_step=1, samples_per_prompt=4)},
            r"the scorer letters is for prompts with \{'wants': 'a'\}, and no prompt is one. There is wants: '9'",
        ),
        (
            {"reward": PARTS, "eval": TextEvalConfig(Rows((PromptRow("1", {"wants": "b"}),)))},
            r"no scorer that counts in the reward applies to the prompt '1'",
        ),
        (
            {
                "eval": TextEvalConfig(Rows(ROWS[:1])),
                "run": RunConfig("run", steps=6, seed=3, keep_best=1, best_metric="eval/letters"),
            },
            "eval/letters is no figure of the evaluation",
        ),
    ],
    ids=["no scorer", "no prompt", "no judge", "no figure"],
)
def test_prompts_and_scorers_that_do_not_fit_are_refused_before_anything_loads(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        config(tmp_path, **settings)
