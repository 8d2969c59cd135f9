"""VQAScore (arXiv 2404.01291): how likely a vision-language model says that the picture shows the prompt."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from unirl.reward.model_scorer import Card
from unirl.reward.picture_questions import PictureQuestions, Question
from unirl.reward.scorer import ScorerInput
from unirl.reward.scorers.geneval2 import YES_FORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAScore(PictureQuestions):
    """The probability of "Yes", among all tokens, in [0, 1]; higher is better.

    wording: t2v_metrics: 'Does this figure show "..."? Please answer Yes or No.', and the token Yes
             geneval2:    'Does this image show "..."? Answer the question with Yes or No.', and four spellings of yes

    A model's figures compare with those of the same model and wording only.
    """

    card: ClassVar[Card] = Card(
        looks_at="image, with the prompt",
        range="0 to 1",
        unit="probability of yes",
        licence="Apache-2.0",
        checkpoints=("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"),
        preprocessing="pil-mrope",
    )

    checkpoint: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    wording: Literal["t2v_metrics", "geneval2"] = "t2v_metrics"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wording not in ("t2v_metrics", "geneval2"):
            raise ValueError(f"wording must be t2v_metrics or geneval2, got {self.wording!r}")

    @property
    def form(self) -> str:
        return self.wording

    def questions(self, sample: ScorerInput) -> list[Question]:
        if self.wording == "geneval2":
            text = f'Does this image show "{sample.prompt}"? Answer the question with Yes or No.'
            return [Question(text, YES_FORMS)]
        return [Question(f'Does this figure show "{sample.prompt}"? Please answer Yes or No.', ("Yes",))]

    def combined(self, probabilities: list[float]) -> float:
        return probabilities[0]
