"""A half of the quickstart that takes a second or two, and is stopped in the middle of it."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

from tests.digit_share import DigitShare
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.trainer.quickstart import Half

_SMALL = """\
model: {layers: 1, heads: 2, width: 16}
sampling: {max_new_tokens: 4}
eval: {samples_per_prompt: 2, prompts: {number: 4}}
logging: {trackers: []}
"""
_BASE = f"""\
defaults: [sft/sort, _self_]
run: {{steps: 2}}
data: {{batch_size: 8}}
train: {{backend: {{optimizer: {{warmup_steps: 1}}}}}}
{_SMALL}"""
_REINFORCED = f"""\
defaults: [ar/sort, _self_]
run: {{steps: 3}}
data: {{prompts_per_step: 2, samples_per_prompt: 4}}
reward: {{scorers: {{stopping: {{scorer: {{_target_: tests.tiny_quickstart.Stopping, mark: MARK}}}}}}}}
{_SMALL}"""


@dataclasses.dataclass(frozen=True)
class Stopping(Scorer):
    """`DigitShare`; the first call of all presses Ctrl-C, and leaves the file `mark`."""

    mark: Path

    def score(self, samples: list[ScorerInput]) -> list[float]:
        if not self.mark.exists():
            self.mark.touch()
            signal.raise_signal(signal.SIGINT)
        return DigitShare().score(samples)


def interrupted_half(folder: Path) -> Half:
    """Its recipes as files in `folder`: two steps of supervision, three of reinforcement, the first one stopped."""
    base, reinforced = folder / "base.yaml", folder / "reinforced.yaml"
    base.write_text(_BASE)
    reinforced.write_text(_REINFORCED.replace("MARK", str(folder / "mark")))
    return Half("tiny", str(base), str(reinforced), (("reward", "eval/reward"),))
