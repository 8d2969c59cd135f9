"""The quickstart, once with pictures and once with text: a base model that is often wrong, then reinforcement."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from unirl.config.compose import text_setting
from unirl.config.run import load_recipe
from unirl.observability.metrics import read
from unirl.trainer.domains import trainer_of
from unirl.trainer.restore import export_run

PLAN = """\
UniRL quickstart: two small models learn what their data leaves open. Under three minutes on a laptop CPU.
  digits  A flow model of 0.6 M parameters learns 8 x 8 digits from captions of which 45 % are wrong (~75 s). Then
          Flow-GRPO: a classifier scores what it draws, and it is reinforced, held by a KL to the base (~30 s).
          Judges that it was never trained on, fitted on the other half of the data, say what was learnt.
  sort    A language model of 0.6 M parameters learns to sort five digits from examples that go up or down at
          random (~25 s). Then GRPO: a reward for the ascending order decides, judged on prompts held out (~10 s).
Ctrl-C stops it; the same command continues.
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the held-out evaluation said. figures: label, before and after; report: of the reinforced run"""

    figures: tuple[tuple[str, float, float], ...]
    report: Path


@dataclasses.dataclass(frozen=True)
class Half:
    """Supervised learning, then reinforcement of the model that came out.

    name:             folder of the half; both of its runs and the model between them are below it
    base, reinforced: recipes of the runs
    figures:          label and name of what the reinforced run's evaluation tells
    """

    name: str
    base: str
    reinforced: str
    figures: tuple[tuple[str, str], ...]

    def learn(self, output: Path, seed: int) -> Outcome:
        """Both runs under `output`, each resumable; a finished one is not done again."""
        folder = output / self.name
        common = [text_setting("run.output", folder), f"run.seed={seed}"]
        base_run = self._fit(self.base, [*common, "run.name=base"])
        model = folder / "base-model"
        if not model.exists():
            export_run(base_run, model)
        run = self._fit(self.reinforced, [*common, "run.name=rl", text_setting("model.checkpoint", model)])
        evaluations = [line for line in read(run / "metrics.jsonl") if "eval/reward" in line]
        figures = tuple((label, evaluations[0][name], evaluations[-1][name]) for label, name in self.figures)
        return Outcome(figures, run / "report.html")

    def _fit(self, recipe: str, settings: Sequence[str]) -> Path:
        sys.stderr.write(f"{self.name}: {recipe}\n")
        return trainer_of(load_recipe(recipe, settings)).fit()


HALVES = (
    Half(
        "digits",
        "sft/digits",
        "diffusion/digits",
        (
            ("asked digit drawn, says a nearest neighbour", "eval/knn"),
            ("asked digit drawn, says a random forest", "eval/forest"),
            ("asked digit drawn, says the reward's own judge", "eval/own"),
            ("diversity (1 = as varied as real digits)", "eval/digits/diversity"),
        ),
    ),
    Half("sort", "sft/sort", "ar/sort", (("digits sorted the rewarded way, held out", "eval/exact"),)),
)


def run_quickstart(output: Path, seed: int, halves: Sequence[Half] = HALVES) -> str:
    """One half after the other under `output`. Returns what was learnt and where the reports are, to be printed."""
    outcomes = [half.learn(output, seed) for half in halves]
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    return "\n".join(
        [
            "What was learnt (before -> after reinforcement):",
            *(f"  {label:<46} {before:6.3f} -> {after:.3f}" for label, before, after in figures),
            *(f"Report: {outcome.report}" for outcome in outcomes),
        ]
    )
