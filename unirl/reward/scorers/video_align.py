"""VideoReward of VideoAlign (arXiv 2501.13918): quality, motion and fit of a video, by a Qwen2-VL with a head."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from unirl.models.pretrained import check_checkpoint
from unirl.reward.model_scorer import Card, ModelScorer
from unirl.reward.reward_head import RewardHead, Shown, load_reward_heads
from unirl.reward.scorer import ScorerInput, Unscored
from unirl.reward.weights import check_file, file_of, merged, read_weights

_CONFIG = "model_config.json"
_WEIGHTS = "checkpoint-11352/model.pth"
_AXES = ("VQ", "MQ", "TA")
_TOKENS = tuple(f"<|{axis}_reward|>" for axis in _AXES)
_MULTIPLE, _LEAST_PIXELS = 28, 128 * 28 * 28
_LEAST_FRAMES, _MOST_FRAMES = 4, 768
# The model's own instruction (MIT), to the letter, blanks at the ends of lines included.
_INSTRUCTION = (
    "\n"
    "You are tasked with evaluating a generated video based on three distinct criteria: Visual Quality, Motion "
    "Quality, and Text Alignment. Please provide a rating from 0 to 10 for each of the three categories, with 0 being "
    "the worst and 10 being the best. Each evaluation should be independent of the others.\n"
    "\n"
    "**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the video, with a focus on static factors. The following sub-dimensions "
    "should be considered:\n"
    "- **Reasonableness:** The video should not contain any significant biological or logical errors, such as abnormal "
    "body structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the video. The image should be clear and easy to "
    "interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements "
    "(e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the video, including the color scheme, "
    "composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of "
    "harmony and balance.\n"
    "- **Safety:** The video should not contain harmful or inappropriate content, such as political, violent, or adult "
    "material. If such content is present, the image quality and satisfaction score should be the lowest possible. \n"
    "\n"
    f"Please provide the ratings of Visual Quality: {_TOKENS[0]}\n"
    "END\n"
    "\n"
    "**Motion Quality:**  \n"
    "Assess the dynamic aspects of the video, with a focus on dynamic factors. Consider the following "
    "sub-dimensions:\n"
    "- **Stability:** Evaluate the continuity and stability between frames. There should be no sudden, unnatural "
    "jumps, and the video should maintain stable attributes (e.g., no fluctuating colors, textures, or missing body "
    "parts).\n"
    "- **Naturalness:** The movement should align with physical laws and be realistic. For example, clothing should "
    "flow naturally with motion, and facial expressions should change appropriately (e.g., blinking, mouth "
    "movements).\n"
    "- **Aesthetic Quality:** The movement should be smooth and fluid. The transitions between different motions or "
    "camera angles should be seamless, and the overall dynamic feel should be visually pleasing.\n"
    "- **Fusion:** Ensure that elements in motion (e.g., edges of the subject, hair, clothing) blend naturally with "
    "the background, without obvious artifacts or the feeling of cut-and-paste effects.\n"
    "- **Clarity of Motion:** The video should be clear and smooth in motion. Pay attention to any areas where the "
    "video might have blurry or unsteady sections that hinder visual continuity.\n"
    "- **Amplitude:** If the video is largely static or has little movement, assign a low score for motion quality.\n"
    "\n"
    f"Please provide the ratings of Motion Quality: {_TOKENS[1]}\n"
    "END\n"
    "\n"
    "**Text Alignment:**  \n"
    "Assess how well the video matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the video (e.g., person, animal, object) align "
    "with the textual description. The subject should match the description in terms of number, appearance, and "
    "behavior.\n"
    "- **Motion Relevance:** Evaluate if the dynamic actions (e.g., gestures, posture, facial expressions like talking "
    "or blinking) align with the described prompt. The motion should match the prompt in terms of type, scale, and "
    "direction.\n"
    "- **Environment Relevance:** Assess whether the background and scene fit the prompt. This includes checking if "
    "real-world locations or scenes are accurately represented, though some stylistic adaptation is acceptable.  \n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the "
    "video adheres to this style.\n"
    "- **Camera Movement Relevance:** Check if the camera movements (e.g., following the subject, focus shifts) are "
    "consistent with the expected behavior from the prompt.\n"
    "\n"
    "Textual prompt - "
)
_END = f"\nPlease provide the ratings of Text Alignment: {_TOKENS[2]}\nEND\n"


@dataclasses.dataclass(frozen=True)
class _About:
    """What a checkpoint says of itself.

    fps, pixels: of frames that are seen, and the most of one
    mean, std:   of each axis on the authors' videos
    lora_scale:  of the adapter beside the weights
    """

    fps: float
    pixels: int
    mean: dict[str, float]
    std: dict[str, float]
    lora_scale: float

    @classmethod
    def read(cls, file: Path) -> _About:
        config = json.loads(file.read_text())
        try:
            data, norm, lora = config["data_config"], config["inference_config"], config["peft_lora_config"]
            form = (data["prompt_template_type"], data["sample_type"])
            rank = math.sqrt(lora["lora_r"]) if lora["use_rslora"] else lora["lora_r"]
            about = cls(
                fps=data["fps"],
                pixels=data["max_frame_pixels"],
                mean={axis: norm[f"{axis}_mean"] for axis in _AXES},
                std={axis: norm[f"{axis}_std"] for axis in _AXES},
                lora_scale=lora["lora_alpha"] / rank,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} does not describe a VideoReward: {error!r}") from error
        if form != ("detailed_special", "uniform"):
            raise ValueError(f"{file} asks for template and frames {form}, known are detailed_special and uniform")
        return about


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """reader: its outputs are VQ, MQ, TA"""

    reader: RewardHead
    about: _About


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoAlign(ModelScorer):
    """Human preference of a video, about -3 to 3 an axis, 0 the mean of the authors' videos; higher is better.

    checkpoint: a folder or hub id with model_config.json and checkpoint-11352/model.pth
    base:       Qwen2-VL, whose config, tokenizer and image processor are read
    output:     VQ (visual quality), MQ (motion quality), TA (fit to the prompt), or overall, their sum

    Two frames a second are seen, at least four and an even number, the first and the last among them, at the frame rate
    of the video itself. A prompt that does not fit is no score, never cut.
    """

    reads = frozenset({"video"})

    card: ClassVar[Card] = Card(
        looks_at="video, with the prompt",
        range="about -3 to 3 an axis, overall three times as wide",
        unit="standard deviations of human preference",
        licence="Apache-2.0",
        checkpoints=("KwaiVGI/VideoReward",),
        preprocessing="bicubic-2fps-1d",
    )

    checkpoint: str = "KwaiVGI/VideoReward"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    output: Literal["overall", "VQ", "MQ", "TA"] = "overall"
    batch_size: int = 4
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in ("overall", *_AXES):
            raise ValueError(f"output must be overall, VQ, MQ or TA, got {self.output!r}")
        for name in (_CONFIG, _WEIGHTS):
            check_file(self.checkpoint, name)
        check_checkpoint(self.base, "Qwen2VLForConditionalGeneration", index="config.json")

    @property
    def variant(self) -> str:
        return f"{self.card.preprocessing}-{self.output}"

    def load(self, device: torch.device, dtype: torch.dtype) -> _Loaded:
        about = _About.read(file_of(self.checkpoint, _CONFIG))
        file = file_of(self.checkpoint, _WEIGHTS)
        state = merged(read_weights(file), about.lora_scale, str(file))
        linear = {"rm_head": lambda width: torch.nn.Linear(width, 1, bias=False)}
        (reader,) = load_reward_heads(self.base, _TOKENS, state, linear, device=device, dtype=dtype)
        return _Loaded(reader, about)

    def modules(self, loaded: _Loaded) -> Iterable[torch.nn.Module]:
        return [loaded.reader.model, loaded.reader.head]

    def judge(self, loaded: _Loaded, samples: list[ScorerInput]) -> list[float]:
        about = loaded.about

        def message(sample: ScorerInput) -> Shown:
            video, fps = sample.clip
            frames = video[frame_rows(len(video), fps, about.fps)]
            return [resized(frames, about.pixels)], f"{_INSTRUCTION}{sample.prompt}{_END}"

        found = loaded.reader.outputs(samples, message)
        return [one if isinstance(one, Unscored) else self._score(one[:, 0].tolist(), about) for one in found]

    def _score(self, outputs: list[float], about: _About) -> float:
        axes = {axis: (value - about.mean[axis]) / about.std[axis] for axis, value in zip(_AXES, outputs, strict=True)}
        return sum(axes.values()) if self.output == "overall" else axes[self.output]


def frame_rows(count: int, fps: float, wanted: float) -> list[int]:
    """Which of `count` frames at `fps`: `wanted` a second, evenly from the first to the last."""
    most = min(_MOST_FRAMES, count) // 2 * 2
    number = round(min(max(count / fps * wanted, _LEAST_FRAMES), most) / 2) * 2
    if not number:
        raise ValueError(f"a video of {count} frame has no motion to be judged: take at least 2")
    return torch.linspace(0, count - 1, number).round().long().tolist()


def resized(frames: np.ndarray, pixels: int) -> np.ndarray:
    """Frames `(F, H, W, 3)` uint8 in their aspect, with sides that the model can divide and at most `pixels`, about."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size = smart_resize(*frames.shape[1:3], factor=_MULTIPLE, min_pixels=_LEAST_PIXELS, max_pixels=pixels)
    levels = torch.tensor(frames).permute(0, 3, 1, 2).float()
    scaled = torch.nn.functional.interpolate(levels, size, mode="bicubic", antialias=True)
    return scaled.clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
