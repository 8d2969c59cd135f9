"""The step of ar_step in TRL's GRPOTrainer."""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.ar_step import LORA_TARGETS, Side, TextCost, TextWorkload, share_of_vowels


class Peer(Side):
    """TRL with its defaults, but in float32 and without recomputing activations, as the other sides."""

    def __init__(self, work: TextWorkload) -> None:
        self._work = work

    def steps(self, count: int) -> list[TextCost]:
        work, clock = self._work, _Clock()
        lora = None
        if work.lora is not None:
            lora = LoraConfig(r=work.lora, lora_alpha=2 * work.lora, target_modules=list(LORA_TARGETS))
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = _Timed(
                model=str(work.checkpoint),
                args=_arguments(folder, work, count),
                reward_funcs=_vowels,
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts]),
                callbacks=[clock],
                peft_config=lora,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        steps = [after - before for before, after in itertools.pairwise(clock.ends)]
        return [
            TextCost(total, rollout, 0.0, tokens)
            for total, rollout, tokens in zip(steps, trainer.rollouts, trainer.tokens, strict=True)
        ]


class _Timed(GRPOTrainer):
    """rollouts: CPU seconds of each; tokens: written in each."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rollouts: list[float] = []
        self.tokens: list[float] = []

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        generated = super()._generate_single_turn(*arguments, **named)
        self.rollouts.append(time.process_time() - start)
        return generated

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.tokens.append(float(inputs["completion_mask"].sum()))
        return super()._compute_loss(model, inputs)


class _Clock(TrainerCallback):
    """ends: of each step, in CPU seconds, after the beginning of the first one."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.process_time())

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.process_time())


def _arguments(folder: str, work: TextWorkload, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        per_device_train_batch_size=work.samples,
        num_generations=work.group,
        max_steps=steps,
        max_completion_length=work.max_new_tokens,
        generation_kwargs={"min_new_tokens": work.max_new_tokens} if work.endless else None,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        loss_type="dapo",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def _vowels(completions: list[str], **columns: Any) -> list[float | None]:
    return [share_of_vowels(text) for text in completions]
