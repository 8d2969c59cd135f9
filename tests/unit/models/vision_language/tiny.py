"""Both models at their tiniest, and rollouts of prompts with uneven pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from unirl.models.ar_pipeline import ARPipeline
from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle
from unirl.models.language.vision_language import VisionLanguage
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.optim import AdamW
from unirl.types.condition import PromptTokens
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

IMAGE = 5  # the placeholder
CPU = torch.device("cpu")
NAMES = ("qwen2_5_vl", "qwen3_vl")
SAMPLING = ARSamplingParams(max_new_tokens=10, seed=3)


def own_model(folder: Path) -> Any:
    """Transformers' model, as it loads it."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint, as we load it and as transformers does."""

    folder: Path
    family: VisionLanguage
    bundle: Bundle
    own: Any

    @property
    def stage(self) -> ARStage:
        return ARStage(self.family, self.bundle, torch.float32)

    def prompts(self) -> PromptTokens:
        return self.family.tokenize(self.bundle, uneven())


def loaded(folder: Path, **settings: Any) -> Loaded:
    family = VisionLanguage(str(folder), **settings)
    return Loaded(folder, family, family.load(CPU, torch.float32), own_model(folder))


def backend(folder: Path, *, trained: Any = "text", **settings: Any) -> FSDPBackend[Any, ARStage]:
    config = ARBackendConfig(optimizer=AdamW(lr=0.05), **settings)
    family = VisionLanguage(str(folder), trained=trained)
    return FSDPBackend(family, config, device=CPU, seed=0, total_steps=10, with_reference=False)


def pictures(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Noise of these heights and widths."""
    draws = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=draws) for size in sizes]


def uneven() -> Media:
    """Two pictures of different sizes, and none."""
    return Media(texts=["What differs?", "Say a word"], sources=[pictures((40, 90), (120, 60)), []])


def written(stage: ARStage, media: Media, *, group: int = 2, sampling: ARSamplingParams = SAMPLING) -> Part:
    """`group` responses to each prompt."""
    ids = [f"r0.p{row}" for row in range(len(media))]
    roots = Part(ids=ids, metadata=[{} for _ in ids], media=media)
    return ARPipeline(stage)(Sample((roots,)).fork(group, sampling), version=0).frontier


def segment(part: Part) -> TextSegment:
    assert isinstance(part.segment, TextSegment)
    return part.segment


def responses(part: Part) -> tuple[torch.Tensor, ...]:
    """The tokens of each."""
    return segment(part).tokens.split(segment(part).lengths.tolist())


def own_inputs(prompts: PromptTokens, row: int, response: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Prompt `row`, and a response, as transformers' model takes it."""
    assert prompts.pictures is not None
    tokens = prompts.tokens.split(prompts.lengths.tolist())[row]
    prompt = (tokens == IMAGE).int()
    if response is None:
        return {"input_ids": tokens[None], "mm_token_type_ids": prompt[None], **prompts.pictures[row]}
    kinds = torch.cat([prompt, torch.zeros(len(response), dtype=torch.int)])
    return {"input_ids": torch.cat([tokens, response])[None], "mm_token_type_ids": kinds[None], **prompts.pictures[row]}
