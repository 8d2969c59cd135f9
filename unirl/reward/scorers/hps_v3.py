"""HPSv3 (arXiv 2508.03789): human preference by a Qwen2-VL with a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch

from unirl.models.pretrained import check_checkpoint
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.reward_head import RewardHead, Shown, gaussian_head, load_reward_heads
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.reward.weights import check_file, file_of

_FILE = "HPSv3.safetensors"
_TOKEN = "<|Reward|>"
_PIXELS = 256 * 28 * 28
# The model's own instruction (MIT), to the letter, blanks at the ends of lines included.
_INSTRUCTION = (
    "\n"
    "You are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a "
    "overall score to estimate the human preference. Please provide a rating from 0 to 10, with 0 being the "
    "worst and 10 being the best. \n"
    "\n"
    "**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:\n"
    "- **Reasonableness:** The image should not contain any significant biological or logical errors, such as "
    "abnormal body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to "
    "interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual "
    "elements (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, "
    "composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense "
    "of harmony and balance.\n"
    "- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or "
    "adult material. If such content is present, the image quality and satisfaction score should be the lowest "
    "possible. \n"
    "\n"
    "**Text Alignment:**  \n"
    "Assess how well the image matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) "
    "align with the textual description. The subject should match the description in terms of number, "
    "appearance, and behavior.\n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well "
    "the image adheres to this style.\n"
    "- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image "
    "logically fit the scenario described in the prompt. The environment should support and enhance the subject "
    "without contradictions.\n"
    "- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing, "
    "accessories, expressions, actions) are faithfully represented in the image. Minor deviations may be "
    "acceptable, but critical attributes should be preserved.\n"
    "- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the "
    "image. The generated content should not introduce elements that conflict with or distort the original "
    "description.\n"
    "Textual prompt - "
)
_END = f"\n\n\n\nPlease provide the overall ratings of this image: {_TOKEN}\n\nEND\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HPSv3(ModelScorer):
    """Human preference, unbounded, about -2 to 15; higher is better: the mean of the model's Gaussian, not its spread.

    checkpoint: a folder or hub id with HPSv3.safetensors
    base:       Qwen2-VL, whose config, tokenizer and image processor are read

    A picture is scaled to about 256 tokens in its aspect. A prompt that does not fit is no score, never cut.
    """

    reads = frozenset({"picture"})

    card: ClassVar[Card] = Card(
        looks_at="image, with the prompt",
        range="unbounded, about -2 to 15",
        unit="human preference",
        licence="Apache-2.0",
        checkpoints=("MizzenAI/HPSv3",),
        preprocessing="pil-200704px-1d",
    )

    checkpoint: str = "MizzenAI/HPSv3"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    batch_size: int = 4
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file(self.checkpoint, _FILE)
        check_checkpoint(self.base, "Qwen2VLForConditionalGeneration", index="config.json")

    def load(self, device: torch.device, dtype: torch.dtype) -> RewardHead:
        from safetensors.torch import load_file

        (loaded,) = load_reward_heads(
            self.base,
            (_TOKEN,),
            load_file(file_of(self.checkpoint, _FILE)),
            {"rm_head": gaussian_head},
            device=device,
            dtype=dtype,
            pixels=_PIXELS,
        )
        return loaded

    def modules(self, loaded: RewardHead) -> Iterable[torch.nn.Module]:
        return [loaded.model, loaded.head]

    def judge(self, loaded: RewardHead, samples: list[ScorerInput]) -> list[float]:
        outputs = loaded.outputs(samples, self._message)
        return [found if isinstance(found, Unscored) else found[0, 0].item() for found in outputs]

    def _message(self, sample: ScorerInput) -> Shown:
        return [sample.picture], f"{_INSTRUCTION}{sample.prompt}{_END}"
