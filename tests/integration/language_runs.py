"""A recipe of a small language model that learns to write digits, in a second or two."""

from __future__ import annotations

from pathlib import Path

RECIPE = """\
# @package _global_
defaults:
  - /base@_global_: ar
  - /rollout: trainside
  - _self_
run: {name: run, steps: 4, seed: 3, save_every: 2, output: OUTPUT}
model: MODEL
data:
  prompts: {_target_: unirl.data.prompts.ListedPrompts, prompts: ["a b:", "c:", "hello:"]}
  prompts_per_step: 2
  samples_per_prompt: 4
sampling: {max_new_tokens: 8}
reward: {scorers: {digits: {scorer: {_target_: tests.digit_share.DigitShare}}}}
algorithm: {_target_: unirl.algorithms.grpo.GRPO}
train: {backend: {optimizer: {lr: 0.01}}, geometry: {num_updates_per_batch: 2, token_budget: 40}}
eval:
  prompts: {_target_: unirl.data.prompts.ListedPrompts, prompts: ["x:", "y z:"]}
  samples_per_prompt: 4
  every: 2
  pass_at: [1, 4]
  success: 0.5
logging: {trackers: []}
"""


TINY = "{_target_: unirl.models.tiny_language.TinyLM, layers: 1, width: 32, heads: 2}"


def write_recipe(folder: Path, model: str = TINY) -> Path:
    """The recipe as a file; its runs go below `folder`."""
    file = folder / "digits.yaml"
    file.write_text(RECIPE.replace("OUTPUT", str(folder / "runs")).replace("MODEL", model))
    return file
