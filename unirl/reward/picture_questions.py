"""How likely a vision-language model finds an answer to a question about a picture: one forward, nothing generated.

All questions about a picture share its tower's features and the tokens up to where they differ: those go through the
model once (`PackedLayout`: the picture is the prompt, the questions are its responses).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, final

import numpy as np
import torch

from unirl.models.base import Bundle
from unirl.models.language.attention import PackedLayout
from unirl.models.language.vision_language import VisionLanguage
from unirl.reward.model_scorer import ModelScorer
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.types.condition import PromptTokens


@dataclasses.dataclass(frozen=True)
class Question:
    """text: what the model is asked; answers: the spellings that are right"""

    text: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """One picture. prompt: its tokens up to where the questions differ; rests, right: tokens of each question."""

    prompt: PromptTokens
    rests: list[list[int]]
    right: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A vision-language model that answers."""

    family: VisionLanguage
    bundle: Bundle

    def asked(self, picture: np.ndarray, questions: list[Question]) -> _Asked:
        """ValueError where a question does not fit into the model's context."""
        prompt, rests = self.family.divided(self.bundle, picture, [one.text for one in questions])
        longest, limit = int(prompt.lengths[0]) + max(map(len, rests)), self.family.context_length(self.bundle)
        if longest > limit:
            raise ValueError(f"the picture and a question about it are {longest} tokens, the model reads {limit}")
        return _Asked(prompt, rests, [self._first_tokens(one.answers) for one in questions])

    def probabilities(self, asked: list[_Asked]) -> list[list[float]]:
        """Of a right answer as the next token, over the whole vocabulary: `(questions,)` for each picture."""
        rests = [rest for one in asked for rest in one.rests]
        parents = torch.tensor([row for row, one in enumerate(asked) for _ in one.rests])
        lengths = torch.tensor([len(rest) for rest in rests])
        pictures = [own for one in asked for own in one.prompt.pictures or [{}]]
        prompts = PromptTokens(
            tokens=torch.cat([one.prompt.tokens for one in asked]),
            lengths=torch.cat([one.prompt.lengths for one in asked]),
            pictures=pictures,
        )
        layout = PackedLayout(prompts.lengths, lengths, parents)
        positions = self.family.packed_positions(self.bundle, prompts, layout)
        tokens = torch.cat([prompts.tokens, torch.tensor([token for rest in rests for token in rest])])
        device = self.bundle.device
        hidden = self.family.read_tokens(self.bundle, tokens, positions, layout, pictures=pictures)
        ends = (len(prompts.tokens) + lengths.cumsum(0) - 1).to(device)
        right = [tokens for one in asked for tokens in one.right]
        sizes = [len(tokens) for tokens in right]
        rows = torch.arange(len(right)).repeat_interleave(torch.tensor(sizes)).to(device)
        columns = torch.tensor([token for tokens in right for token in tokens], device=device)
        found = self.family.logits(self.bundle, hidden[ends]).float().softmax(-1)[rows, columns].double()
        sums = iter([float(each.sum()) for each in found.cpu().split(sizes)])
        return [[next(sums) for _ in one.right] for one in asked]

    def _first_tokens(self, answers: tuple[str, ...]) -> list[int]:
        """Of each spelling, without repetition."""
        tokenizer = self.bundle.processors["tokenizer"]
        rows = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
        return list(dict.fromkeys(row[0] for row in rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureQuestions(ModelScorer):
    """A scorer that puts questions about its picture to a vision-language model.

    checkpoint: Qwen2.5-VL or Qwen3-VL: a hub id or a folder
    min_pixels, max_pixels: a picture is scaled to an area between these; null takes the checkpoint's own
    batch_size: pictures in one forward, each with all its questions
    """

    reads = frozenset({"picture"})

    checkpoint: str
    min_pixels: int | None = None
    max_pixels: int | None = None
    batch_size: int = 4
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._family()

    @abstractmethod
    def questions(self, sample: ScorerInput) -> list[Question]:
        """At least one; ValueError for a sample that cannot be asked about."""

    @abstractmethod
    def combined(self, probabilities: list[float]) -> float:
        """The score, from the probability of a right answer to each question."""

    @final
    def probabilities(self, samples: list[ScorerInput]) -> list[list[float]]:
        """Of a right answer to each question, for each sample; empty where it cannot be scored."""
        rows = []
        with torch.no_grad():
            for start in range(0, len(samples), self.batch_size):
                answered = self._answered(self._loaded, samples[start : start + self.batch_size])
                rows += [[] if isinstance(row, Unscored) else row for row in answered]
        return rows

    @final
    def load(self, device: torch.device, dtype: torch.dtype) -> Loaded:
        family = self._family()
        return Loaded(family, family.load(device, dtype))

    @final
    def modules(self, loaded: Loaded) -> Iterable[torch.nn.Module]:
        return [loaded.bundle.transformer]

    @final
    def judge(self, loaded: Loaded, samples: list[ScorerInput]) -> list[float]:
        answered = self._answered(loaded, samples)
        return [row if isinstance(row, Unscored) else self.combined(row) for row in answered]

    @property
    def variant(self) -> str:
        sizes = f"{self.min_pixels or ''}..{self.max_pixels or ''}px"
        return f"{self.card.preprocessing}-{sizes}-{self.dtype}-{self.form}"

    @property
    @abstractmethod
    def form(self) -> str:
        """What else decides the score, in a word."""

    def _family(self) -> VisionLanguage:
        # With its tower inside: what `modules` hashes is the whole model.
        sizes: dict[str, Any] = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return VisionLanguage(self.checkpoint, trained="all", **sizes)

    def _answered(self, loaded: Loaded, samples: list[ScorerInput]) -> list[list[float] | Unscored]:
        """A sample that cannot be asked about costs the others nothing."""
        asked: list[_Asked | Unscored] = []
        for sample in samples:
            try:
                asked.append(loaded.asked(sample.picture, self.questions(sample)))
            except ValueError as error:
                asked.append(Unscored(str(error)))
        good = [one for one in asked if isinstance(one, _Asked)]
        rows = iter(loaded.probabilities(good) if good else [])
        return [one if isinstance(one, Unscored) else next(rows) for one in asked]
