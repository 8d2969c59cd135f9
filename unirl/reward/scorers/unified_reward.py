"""UnifiedReward (arXiv 2503.05236): a model trained to rate pictures, behind an OpenAI-compatible URL."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Literal

from unirl.reward.chat import Chat, Illustrated, NoReply
from unirl.reward.scorer import Scorer, ScorerInput, Unscored
from unirl.reward.scorers.judge import read_number

Output = Literal["mean", "alignment", "coherence", "style"]

_AXES = ("Alignment", "Coherence", "Style")
# The models' own prompts (MIT), to the letter: they were trained on them.
_INTRODUCTION = (
    "You are presented with a generated image and its associated text caption. Your task is to analyze the image "
    "across multiple dimensions in relation to the caption. Specifically:\n"
)
_AXES_LINES = (
    "- Alignment Score: How well the image matches the caption in terms of content.\n"
    "- Coherence Score: How logically consistent the image is (absence of visual glitches, object distortions, etc.).\n"
    "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n\n"
    "Output your evaluation using the format below:\n\n"
)
_END = (
    "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n"
    "Your task is provided as follows:\nText Caption: ["
)
_TEMPLATES = {
    "1.0": (
        "You are given a text caption and a generated image based on that caption. Your task is to evaluate this image "
        "based on two key criteria:\n"
        "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the "
        "accuracy of depicted objects, their relationships, and attributes as described in the caption.\n"
        "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail preservation, "
        "color accuracy, and overall aesthetic appeal.\n"
        "Extract key elements from the provided text caption, evaluate their presence in the generated image using the "
        "format: 'element (type): value' (where value=0 means not generated, and value=1 means generated), and assign "
        "a score from 1 to 5 after 'Final Score:'.\n"
        "Your task is provided as follows:\nText Caption: ["
    ),
    "1.5": (
        f"{_INTRODUCTION}\n"
        "1. Evaluate each word in the caption based on how well it is visually represented in the image. Assign a "
        "numerical score to each word using the format:\n"
        '   Word-wise Scores: [["word1", score1], ["word2", score2], ..., ["wordN", scoreN], '
        '["[No_mistakes]", scoreM]]\n'
        "   - A higher score indicates that the word is less well represented in the image.\n"
        "   - The special token [No_mistakes] represents whether all elements in the caption were correctly depicted. "
        "A high score suggests no mistakes; a low score suggests missing or incorrect elements.\n\n"
        "2. Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
        f"{_AXES_LINES}---\n\n"
        'Word-wise Scores: [["word1", score1], ..., ["[No_mistakes]", scoreM]]\n\n'
        f"{_END}"
    ),
    "2.0": (
        f"{_INTRODUCTION}"
        "Provide overall assessments for the image along the following axes (each rated from 1 to 5):\n"
        f"{_AXES_LINES}{_END}"
    ),
}


@dataclasses.dataclass(frozen=True)
class UnifiedReward(Scorer):
    """The model's rating of a picture for its prompt, in [1, 5]; higher is better. Weights and code MIT.

    chat:    a server of the model, such as vLLM or SGLang; pictures are sent as PNG
    release: of the model, which decides its prompt: 1.0 (one final score), 1.5 or 2.0 (alignment, coherence, style)
    output:  one of the three, or their mean, which a rating that lacks one has not

    Release 1.5 rates every word first: leave it `max_tokens` for that. A reply without the ratings, with different
    ones, or with one out of range: NaN, with its cause. FLUX-pro-ultra has 3.65, 3.82 and 3.50 on the authors' prompts.
    """

    reads = frozenset({"picture"})

    chat: Chat
    release: Literal["1.0", "1.5", "2.0"] = "2.0"
    output: Output = "mean"

    def __post_init__(self) -> None:
        if self.release not in _TEMPLATES:
            raise ValueError(f"release must be 1.0, 1.5 or 2.0 in quotes, got {self.release!r}")
        if self.output not in ("mean", *(axis.lower() for axis in _AXES)):
            raise ValueError(f"output must be mean, alignment, coherence or style, got {self.output!r}")
        if self.release == "1.0" and self.output != "mean":
            raise ValueError(f"release 1.0 gives one final score and no {self.output}: leave output at mean")

    def score(self, samples: list[ScorerInput]) -> list[float]:
        messages = [Illustrated(self.message(sample.prompt), (sample.picture,)) for sample in samples]
        return [self._read(reply) for reply in self.chat.replies(messages)]

    def message(self, prompt: str) -> str:
        """What the model is asked about the picture of a prompt."""
        return f"{_TEMPLATES[self.release]}{prompt}]"

    def _read(self, reply: str | NoReply) -> float:
        axes = _AXES if self.output == "mean" else (self.output.capitalize(),)
        names = ("Final Score",) if self.release == "1.0" else tuple(rf"{axis} Score \(1-5\)" for axis in axes)
        # A line of its own: the letters of the format, repeated, hold no number.
        numbers = [
            read_number(reply, rf"(?m)^[^\w\n]*{name}:[\s*]*(-?\d+(?:\.\d+)?)[^\w\n]*$", 1.0, 5.0) for name in names
        ]
        missing = [number for number in numbers if isinstance(number, Unscored)]
        return missing[0] if missing else statistics.fmean(numbers)
