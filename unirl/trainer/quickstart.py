"""The quickstart: a base model from half-wrong captions, then reinforcement learning sets it right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.config.compose import text_setting
from unirl.config.run import load_recipe
from unirl.observability.metrics import read
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.flow_sft import FlowSFTTrainer
from unirl.trainer.restore import export_run

PLAN = """\
UniRL quickstart: teach a small text-to-image model to draw the digit that was asked for. Two minutes on a laptop CPU.
  1. Supervised: a 0.6 M parameter flow model learns 8 x 8 digits from captions of which 45 % are wrong (~75 s).
  2. Flow-GRPO: it draws digits, a classifier scores them, it is reinforced, held by a KL to the base (~30 s).
  3. Judges that it was never trained on, fitted on the other half of the data, say what was learnt.
Ctrl-C stops it; the same command continues.
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of the held-out evaluation before and after reinforcement learning, and where the report is."""

    before: dict[str, float]
    after: dict[str, float]
    report: Path

    @property
    def summary(self) -> str:
        """What was learnt, in a few lines."""
        lines = [
            f"  {label:<46} {self.before[name]:6.3f} -> {self.after[name]:.3f}"
            for label, name in (
                ("asked digit drawn, says a nearest neighbour", "eval/knn"),
                ("asked digit drawn, says a random forest", "eval/forest"),
                ("asked digit drawn, says the reward's own judge", "eval/own"),
                ("diversity (1 = as varied as real digits)", "eval/digits/diversity"),
            )
        ]
        return "\n".join(["What was learnt (before -> after reinforcement):", *lines, f"Report: {self.report}"])


def run_quickstart(output: Path, seed: int) -> Outcome:
    """Both stages under `output`, each resumable; a finished stage is not done again."""
    common = [text_setting("run.output", output), f"run.seed={seed}"]
    base_run = FlowSFTTrainer(load_recipe("sft/digits", [*common, "run.name=base"])).fit()
    base = output / "base-model"
    if not base.exists():
        export_run(base_run, base)
    recipe = load_recipe("diffusion/digits", [*common, "run.name=rl", text_setting("model.checkpoint", base)])
    run = DiffusionTrainer(recipe).fit()
    evaluations = [line for line in read(run / "metrics.jsonl") if "eval/reward" in line]
    return Outcome(before=evaluations[0], after=evaluations[-1], report=run / "report.html")
