"""GenEval 2 (arXiv 2512.16853): are the objects, counts, attributes and relations of the prompt in the picture?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import ClassVar, Literal

from unirl.reward.model_scorer import Card
from unirl.reward.picture_questions import PictureQuestions, Question
from unirl.reward.scorer import ScorerInput

YES_FORMS = ("Yes", "yes", " yes", " Yes")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenEval2(PictureQuestions):
    """Soft-TIFA: the mean probability of the right answers to the questions of the prompt; in [0, 1], higher is better.

    A prompt's row brings its questions, [[question, answer], ...]; answers are "Yes" or a number word up to "ten". The
    probability of an answer is the sum over the first tokens of its spellings (yes, Yes, " yes", " Yes"; two, Two, 2
    and the same with a blank), among all tokens. A row without questions has no score.

    mean:          arithmetic, the smoother reward (the benchmark's figure per skill), or geometric (its headline):
                   0 as soon as one answer has no probability
    questions_key: of the prompt's row

    The benchmark is the mean of 100 x score over its 800 prompts (geneval2_data.jsonl, CC BY-NC 4.0, not shipped).
    "ten" is read at its first token: Qwen's tokenizer writes 10 with the token of 1.
    """

    card: ClassVar[Card] = Card(
        looks_at="image, with the questions of its prompt",
        range="0 to 1",
        unit="mean probability of the right answers",
        licence="Apache-2.0 (model)",
        checkpoints=("Qwen/Qwen3-VL-8B-Instruct",),
        preprocessing="pil-mrope",
    )

    checkpoint: str = "Qwen/Qwen3-VL-8B-Instruct"
    mean: Literal["arithmetic", "geometric"] = "arithmetic"
    questions_key: str = "vqa_list"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean not in ("arithmetic", "geometric"):
            raise ValueError(f"mean must be arithmetic or geometric, got {self.mean!r}")

    @property
    def form(self) -> str:
        return self.mean

    def questions(self, sample: ScorerInput) -> list[Question]:
        rows = sample.given(self.questions_key)
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"the prompt {sample.prompt!r} has no questions in metadata[{self.questions_key!r}]")
        return [self._question(sample, row) for row in rows]

    def combined(self, probabilities: list[float]) -> float:
        return statistics.fmean(probabilities) if self.mean == "arithmetic" else geometric_mean(probabilities)

    def _question(self, sample: ScorerInput, row: object) -> Question:
        match row:
            case [str(text), str(answer)]:
                return Question(f"{text} Answer in one word.", answer_forms(answer))
        raise ValueError(f"{sample.id}: a question must read [question, answer], both text, got {row!r}")


def answer_forms(answer: str) -> tuple[str, ...]:
    """The spellings of an answer: `answer_forms("two") == ("two", "Two", " two", " Two", "2", " 2")`."""
    if answer == "Yes":
        return YES_FORMS
    if answer not in _NUMBERS:
        raise ValueError(f"the answer to a question must be Yes or one of {', '.join(_NUMBERS)}, got {answer!r}")
    digits = str(_NUMBERS.index(answer) + 1)
    return (answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", digits, f" {digits}")


def geometric_mean(values: list[float]) -> float:
    """Of values in [0, 1]; 0 where one is 0."""
    if min(values) <= 0:
        return 0.0
    return math.exp(statistics.fmean(math.log(value) for value in values))
