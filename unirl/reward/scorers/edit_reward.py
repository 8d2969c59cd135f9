"""EditReward (arXiv 2509.26346): how well an edit follows its instruction and how good it looks, by a Qwen2.5-VL."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch

from unirl.models.pretrained import check_checkpoint
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.reward_head import RewardHead, Shown, gaussian_head, load_reward_heads
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.reward.weights import check_file, file_of

_FILE = "model.safetensors"
_TOKEN = "<|Reward|>"
_PIXELS = 256 * 28 * 28
# The model's own instruction of each head (MIT), to the letter, blanks at the ends of lines included.
_INSTRUCTIONS = {
    "following": (
        "\n"
        "You are tasked with evaluating an edited image **in comparison with the original source image** based on "
        "**Instruction Following & Semantic Fidelity**, and assigning a score from 1 to 4, with 1 being the worst "
        "and 4 being the best.  \n"
        "This dimension focuses on how accurately, completely, and exclusively the model executed the given text "
        "instruction.\n"
        "\n"
        "**Inputs Provided:**  \n"
        "- Source Image (before editing)  \n"
        "- Edited Image (after applying the instruction)  \n"
        "- Text Instruction  \n"
        "\n"
        "**Sub-Dimensions to Evaluate:**\n"
        "\n"
        "- **Semantic Accuracy:**  \n"
        "  Assess whether the edited content accurately captures the semantics of the instruction. The edited result "
        'should precisely match the intended meaning. For example, if the instruction is "replace apples with '
        'oranges," the object must clearly be oranges, not other fruits.\n'
        "\n"
        "- **Completeness of Editing:**  \n"
        '  Check whether **all parts** of the instruction are fully executed. For multi-step edits (e.g., "replace '
        'a red car with a blue bicycle"), both the color change and the object replacement must be done without '
        "omissions.\n"
        "\n"
        "- **Exclusivity of Edit (No Over-Editing):**  \n"
        "  Ensure that only the requested parts are changed. The rest of the image (as seen in the source) should "
        "remain unaltered. For example, if the instruction only involves replacing an object, the background, "
        "lighting, and unrelated objects should not be unnecessarily modified.\n"
        "\n"
        "**Scoring Criteria:**\n"
        "- **4 (Very Good):** Perfectly accurate, complete, and exclusive execution of the instruction.  \n"
        "- **3 (Relatively Good):** Largely correct, but with minor omissions or slight over-editing.  \n"
        "- **2 (Relatively Poor):** Major misinterpretation, incomplete edits, or noticeable unintended changes.  \n"
        "- **1 (Very Poor):** Instruction ignored or completely wrong execution.\n"
        "\n"
        "Text instruction - "
    ),
    "quality": (
        "\n"
        "You are tasked with evaluating an edited image **in comparison with the original source image** based on "
        "**Visual Quality & Realism**, and assigning a score from 1 to 4, with 1 being the worst and 4 being the "
        "best.  \n"
        "This dimension focuses on how realistic, artifact-free, and aesthetically appealing the edited image is, "
        "while remaining consistent with the source image.\n"
        "\n"
        "**Inputs Provided:**  \n"
        "- Source Image (before editing)  \n"
        "- Edited Image (after applying the instruction)  \n"
        "- Text Instruction  \n"
        "\n"
        "**Sub-Dimensions to Evaluate:**\n"
        "\n"
        "- **Plausibility & Physical Consistency:**  \n"
        "  Check whether the edit aligns with the laws of physics and the scene context. Lighting, shadows, "
        "reflections, perspective, size, and interactions with the environment should all appear natural compared to "
        "the source image.\n"
        "\n"
        "- **Artifact-Free Quality:**  \n"
        "  Look for technical flaws such as blur, distortions, pixel misalignment, unnatural textures, or seams "
        "around edited regions. High-quality results should be free from such visible artifacts.\n"
        "\n"
        "- **Aesthetic Quality:**  \n"
        "  Evaluate the overall harmony and visual appeal. The image should look natural, balanced, and pleasant. "
        "Colors, composition, and atmosphere should enhance the image rather than degrade it.\n"
        "\n"
        "**Scoring Criteria:**\n"
        "- **4 (Very Good):** Perfectly realistic, artifact-free, seamless, and aesthetically pleasing.  \n"
        "- **3 (Relatively Good):** Mostly realistic and clean, with only minor flaws that do not significantly "
        "distract.  \n"
        "- **2 (Relatively Poor):** Noticeable physical inconsistencies or visible artifacts that make the edit "
        "unnatural.  \n"
        "- **1 (Very Poor):** Severe artifacts, incoherent composition, or visually unusable result.\n"
        "\n"
        "Text instruction - "
    ),
}
_END = f"\n\nPlease provide the overall ratings of this image: {_TOKEN}\n\nEND\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditReward(ModelScorer):
    """Human preference of an edited picture beside its source, unbounded and mostly below 0; higher is better.

    checkpoint: a folder or hub id with model.safetensors
    base:       Qwen2.5-VL, whose config, tokenizer and image processor are read; of the MiMo checkpoint
                XiaomiMiMo/MiMo-VL-7B-SFT-2508
    output:     following (of the instruction, which is the prompt), quality (how it looks), or mean of the two

    Each is the mean of a Gaussian that the model predicts, not its spread. The prompt comes with exactly one picture;
    both are scaled to about 256 tokens in their aspect. A prompt that does not fit is no score, never cut.
    """

    reads = frozenset({"picture", "source"})

    card: ClassVar[Card] = Card(
        looks_at="image and its source, with the prompt",
        range="unbounded, mostly below 0",
        unit="human preference",
        licence="MIT",
        checkpoints=("TIGER-Lab/EditReward-Qwen2.5-VL-7B", "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508"),
        preprocessing="pil-200704px-1d",
    )

    checkpoint: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    output: Literal["mean", "following", "quality"] = "mean"
    batch_size: int = 4
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in ("mean", *_INSTRUCTIONS):
            raise ValueError(f"output must be mean, following or quality, got {self.output!r}")
        check_file(self.checkpoint, _FILE)
        check_checkpoint(self.base, "Qwen2_5_VLForConditionalGeneration", index="config.json")

    @property
    def variant(self) -> str:
        return f"{self.card.preprocessing}-{self.output}"

    def load(self, device: torch.device, dtype: torch.dtype) -> dict[str, RewardHead]:
        from safetensors.torch import load_file

        heads = load_reward_heads(
            self.base,
            (_TOKEN,),
            load_file(file_of(self.checkpoint, _FILE)),
            {"rm_heads.head_0": gaussian_head, "rm_heads.head_1": gaussian_head},
            device=device,
            dtype=dtype,
            pixels=_PIXELS,
        )
        return dict(zip(_INSTRUCTIONS, heads, strict=True))

    def modules(self, loaded: dict[str, RewardHead]) -> Iterable[torch.nn.Module]:
        return [loaded["following"].model, *(own.head for own in loaded.values())]

    def judge(self, loaded: dict[str, RewardHead], samples: list[ScorerInput]) -> list[float]:
        kinds = list(_INSTRUCTIONS) if self.output == "mean" else [self.output]
        columns = [self._means(kind, loaded[kind], samples) for kind in kinds]
        scores = list[float]()
        for row in zip(*columns, strict=True):
            failed = [one for one in row if isinstance(one, Unscored)]
            scores.append(failed[0] if failed else statistics.fmean(row))
        return scores

    def _means(self, kind: str, reader: RewardHead, samples: list[ScorerInput]) -> list[float]:
        def message(sample: ScorerInput) -> Shown:
            return [sample.original, sample.picture], f"{_INSTRUCTIONS[kind]}{sample.prompt}{_END}"

        found = reader.outputs(samples, message)
        return [one if isinstance(one, Unscored) else one[0, 0].item() for one in found]
