"""One GRPO step of a language model: through the product, through TRL's GRPOTrainer (trl_side), and by a bare loop.

All sides have the same weights, prompts, group, lengths and loss (clipped, token-mean, no KL, one update of one
micro-batch). Times are the process's own CPU seconds on one thread and only mean something as ratios within one run.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.bare_text_loop import Prompts, bare_text_step
from benchmarks.model_time import model_seconds
from unirl.algorithms.base import Progress
from unirl.algorithms.grpo import GRPO
from unirl.data.prompts import PromptRow, as_roots
from unirl.distributed.group.placement import Placement, Slab
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import Bundle
from unirl.models.language.causal_lm import CausalLM
from unirl.reward.scorer import Scorer, ScorerInput
from unirl.reward.service import RewardConfig, RewardService, WeightedScorer
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, TokenGeometry
from unirl.types.sample import Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class TextWorkload:
    """checkpoint: a folder; prompts: as they stand; endless: no response ends before max_new_tokens"""

    checkpoint: Path
    prompts: tuple[str, ...]
    group: int
    max_new_tokens: int
    lora: int | None
    endless: bool

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.group


@dataclasses.dataclass(frozen=True)
class TextCost:
    """CPU seconds of a step, those of its rollout and those inside the model; tokens written; memory in MiB.

    peak_mib: the highest resident memory; resting_mib: before the first step, when the model is loaded
    """

    total: float
    rollout: float
    model: float
    tokens: float
    peak_mib: float = 0.0
    resting_mib: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Of the whole step."""
        return self.total / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Of the rollout."""
        return self.tokens / self.rollout

    @property
    def used_mib(self) -> float:
        """What the steps need beside a loaded model."""
        return self.peak_mib - self.resting_mib


class Side(ABC):
    """One way of doing the step."""

    @abstractmethod
    def steps(self, count: int) -> list[TextCost]:
        """The cost of each of `count` steps."""


@dataclasses.dataclass(frozen=True)
class Vowels(Scorer):
    """Share of vowels in a text: costs nothing, so the benchmark times the rest."""

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [share_of_vowels(sample.text or "") for sample in samples]


def share_of_vowels(text: str) -> float:
    return sum(text.count(vowel) for vowel in "aeiou") / max(len(text), 1)


@dataclasses.dataclass(frozen=True)
class Endless(CausalLM):
    """A model that never stops by itself."""

    def end_tokens(self, bundle: Bundle) -> tuple[int, ...]:
        return ()


class Product(Side):
    """The workload on the real backend, engine, reward service and stack."""

    def __init__(self, slab: Slab, work: TextWorkload) -> None:
        self._work = work
        family = (Endless if work.endless else CausalLM)(checkpoint=str(work.checkpoint), template="plain")
        config = ARBackendConfig(
            optimizer=AdamW(lr=1e-6),
            lora=None if work.lora is None else LoRA(rank=work.lora, alpha=2 * work.lora),
            compute_dtype="float32",
        )
        self.backend = slab.spawn(
            FSDPBackend, family, config, device=torch.device("cpu"), seed=0, total_steps=1000, with_reference=False
        )
        self._rollout = slab.spawn(TrainsideEngine, self.backend, Trainside(), ARPipeline)
        self._reward = slab.spawn(RewardService, RewardConfig({"vowels": WeightedScorer(Vowels())}))
        algorithm = GRPO(clip_low=0.2, clip_high=0.2)
        self._stack = slab.spawn(TrainStack, self.backend, algorithm, TokenGeometry())
        self._done = 0

    def steps(self, count: int) -> list[TextCost]:
        # In-process launcher: the benchmark looks behind the handle, which the product never does.
        host = self.backend.launcher._host  # type: ignore[attr-defined]  # noqa: SLF001 - the yardstick looks inside
        bundle = host._instances[self.backend.key].stage.bundle  # noqa: SLF001 - the yardstick looks inside
        return [self._step(bundle.transformer) for _ in range(count)]

    def _step(self, transformer: Any) -> TextCost:
        """Prompts -> rollout -> reward -> advantage -> one update."""
        with model_seconds(transformer.base_model, transformer.get_output_embeddings()) as spent:
            start = time.process_time()
            rows = as_roots([PromptRow(prompt) for prompt in self._work.prompts], self._done)
            sampling = ARSamplingParams(max_new_tokens=self._work.max_new_tokens)
            sample = self._rollout.generate(Sample((rows,)).fork(self._work.group, sampling))
            rolled_out = time.process_time() - start
            part = sample.frontier.with_rewards(self._reward.score(sample)).compute_advantages(eps=1e-4)
            self._stack.train(Batch.of(part, 0, ranks=1), Progress(self._done, 1000))
            total = time.process_time() - start
        self._done += 1
        assert isinstance(part.segment, TextSegment)
        return TextCost(total, rolled_out, spent[0], float(part.segment.lengths.sum()))


class Bare(Side):
    """The same model in a hand-written loop on transformers' own cache."""

    def __init__(self, work: TextWorkload) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._work = work
        self._model: Any = AutoModelForCausalLM.from_pretrained(work.checkpoint, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(work.checkpoint)
        self._tokenizer.pad_token = self._tokenizer.eos_token
        if work.lora is not None:
            from unirl.train.lora import inject

            inject(self._model, LoRA(rank=work.lora, alpha=2 * work.lora), LORA_TARGETS, 0)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0, fused=True)

    def steps(self, count: int) -> list[TextCost]:
        return [self._step() for _ in range(count)]

    def _step(self) -> TextCost:
        work = self._work
        prompts = self._tokenizer(list(work.prompts), return_tensors="pt", padding=True, padding_side="left")
        end = -1 if work.endless else self._tokenizer.eos_token_id
        start = time.process_time()
        rolled_out, written = bare_text_step(
            self._model,
            self._optimizer,
            Prompts(prompts["input_ids"], prompts["attention_mask"], work.group),
            room=work.max_new_tokens,
            end=end,
            score=lambda tokens: share_of_vowels(self._tokenizer.decode(tokens)),
        )
        return TextCost(time.process_time() - start, rolled_out - start, 0.0, float(written))


SideName = Literal["product", "trl", "bare"]


def measure_text(side: SideName, work: TextWorkload, repeats: int) -> TextCost:
    """The cheapest of `repeats` steps after a warm-up, in this process."""
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if side == "trl":
        from benchmarks.trl_side import Peer

        return _cheapest(lambda: Peer(work), repeats)
    if side == "bare":
        return _cheapest(lambda: Bare(work), repeats)
    with Placement(device="cpu").slab() as slab:
        return _cheapest(lambda: Product(slab, work), repeats)


def _cheapest(make: Callable[[], Side], repeats: int) -> TextCost:
    side = make()
    resting = _resident_mib()
    costs = side.steps(1 + repeats)[1:]
    best = min(costs, key=lambda own: own.seconds_per_token)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dataclasses.replace(best, peak_mib=peak, resting_mib=resting)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
