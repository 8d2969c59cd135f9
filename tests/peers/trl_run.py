"""A run of TRL's GRPOTrainer on a TinyLM: what it was given, and what it made of it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from unirl.data.prompts import PromptRow, as_roots
from unirl.models.tiny_language import TinyLM
from unirl.types.condition import PromptTokens
from unirl.types.media import Media
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

PROMPTS = ("a b:", "hello, how:")  # of uneven length: TRL pads the first
GROUP = 4
SAMPLING = ARSamplingParams(max_new_tokens=12, temperature=0.8)
# Few characters, so that responses end by themselves at uneven lengths.
FAMILY = TinyLM(layers=2, width=32, heads=2, characters=" abehlow:,")


@dataclasses.dataclass
class OptimizerStep:
    """One optimizer step of TRL, of micro-batches that are padded `(B, S)`.

    batches: its inputs; log_probs, entropies: `(B, S)` at its completions; losses: divided by what the step divides by
    weights, gradients: by name, before the step
    """

    batches: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    log_probs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    entropies: list[torch.Tensor] = dataclasses.field(default_factory=list)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        return float(torch.stack(self.losses).sum())

    @property
    def part(self) -> Part:
        """The same rows as a filled part, whose rollout recorded TRL's old log-probs."""
        rows = [_row(batch, place) for batch in self.batches for place in range(len(batch["completion_ids"]))]
        rows.sort(key=lambda row: row.prompt.tolist())
        prompts = list(dict.fromkeys(tuple(row.prompt.tolist()) for row in rows))
        assert len(rows) == len(prompts) * GROUP
        lengths = torch.tensor([len(row.tokens) for row in rows])
        part = as_roots([PromptRow(str(prompt)) for prompt in prompts], 0).fork(GROUP, SAMPLING)
        filled = part.fill(
            media=Media(texts=[""] * len(rows)),
            segment=TextSegment(
                tokens=torch.cat([row.tokens for row in rows]),
                log_probs=torch.cat([row.old_log_probs for row in rows]),
                loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
                lengths=lengths,
                truncated=lengths == SAMPLING.max_new_tokens,
            ),
            conditions=PromptTokens(
                tokens=torch.cat([row.prompt for row in rows]),
                lengths=torch.tensor([len(row.prompt) for row in rows]),
            ),
            version=-1,
        )
        return dataclasses.replace(filled, advantages=torch.stack([row.advantage for row in rows]))

    def packed(self, padded: list[torch.Tensor]) -> torch.Tensor:
        """`(T,)`, in the order of the tokens of `part`."""
        rows = [
            (batch["prompt_ids"][place][batch["prompt_mask"][place].bool()].tolist(), own[place][mask.bool()])
            for batch, own in zip(self.batches, padded, strict=True)
            for place, mask in enumerate(batch["completion_mask"])
        ]
        rows.sort(key=lambda row: row[0])
        return torch.cat([values for _, values in rows])


@dataclasses.dataclass(frozen=True)
class _Row:
    prompt: torch.Tensor
    tokens: torch.Tensor
    old_log_probs: torch.Tensor
    advantage: torch.Tensor


def _row(batch: dict[str, torch.Tensor], place: int) -> _Row:
    written = batch["completion_mask"][place].bool()
    return _Row(
        prompt=batch["prompt_ids"][place][batch["prompt_mask"][place].bool()],
        tokens=batch["completion_ids"][place][written],
        old_log_probs=batch["old_per_token_logps"][place][written],
        advantage=batch["advantages"][place],
    )


class _Recording(GRPOTrainer):
    """Notes what passes through; changes nothing."""

    def __init__(self, steps: list[OptimizerStep], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._noted = steps

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        own = self._noted[-1]
        own.batches.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        loss = super()._compute_loss(model, inputs)
        own.losses.append(loss.detach().clone())
        own.log_probs.append(self._last[0].detach())
        own.entropies.append(self._last[1].detach())
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        self._last = super()._get_per_token_logps_and_entropies(*arguments, **named)
        return self._last


class _BeforeSteps(TrainerCallback):
    def __init__(self, steps: list[OptimizerStep]) -> None:
        self._steps = steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        own = self._steps[-1]
        for name, parameter in named["model"].named_parameters():
            own.weights[name] = parameter.detach().clone()
            own.gradients[name] = parameter.grad.clone()
        self._steps.append(OptimizerStep())


def _share_of_a(completions: list[str], **columns: Any) -> list[float]:
    return [text.count("a") / max(len(text), 1) for text in completions]


def recorded(folder: Path, checkpoint: Path, **settings: Any) -> list[OptimizerStep]:
    """Three optimizer steps on one rollout, of two micro-batches each. settings: of GRPOConfig."""
    steps = [OptimizerStep()]
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        per_device_train_batch_size=len(PROMPTS) * GROUP // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        num_iterations=3,
        max_steps=3,
        max_completion_length=SAMPLING.max_new_tokens,
        temperature=SAMPLING.temperature,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **settings,
    )
    trainer = _Recording(
        steps,
        model=str(checkpoint),
        args=arguments,
        reward_funcs=_share_of_a,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        callbacks=[_BeforeSteps(steps)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL asks transformers for names that are going out of use
        trainer.train()
    return steps[:-1]
