"""Qwen-Image-2.1, from texts alone and with source pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.families.case import TEXTS, Case, run_pipeline
from tests.families.cases.qwen_image import guided_arguments
from tests.families.cases.qwen_image_edit import TALL, WIDE, as_pil, sources
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.qwen_image_2_1 import QwenImage21, SlottedEmbedding, on_white
from unirl.models.random_weights.qwen_image_2_1 import write
from unirl.sde.schedule import pin, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

SIDE = 48  # of a square with the area of a source picture


@dataclasses.dataclass(frozen=True)
class NormKept(QwenImage21):
    """The guidance of Qwen-Image."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        guided = super().guide(conditional, unconditional, at)
        return guided * conditional.norm(dim=1, keepdim=True) / guided.norm(dim=1, keepdim=True)


@dataclasses.dataclass(frozen=True)
class Unshifted(QwenImage21):
    """The schedule does not depend on the size."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(uniform_sigmas(sampling.steps))
        return Schedule(sigmas=sigmas, times=sigmas[:-1])


@dataclasses.dataclass(frozen=True)
class PicturesAfterPadding(QwenImage21):
    """All rows share a forward, as rows of different length do in the pipeline."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        embedding = super().encode(bundle, prompts, sampling)
        assert isinstance(embedding, SlottedEmbedding)
        assert embedding.mask is not None
        return dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))


@dataclasses.dataclass(frozen=True)
class TimeReversed(QwenImage21):
    """The model time is 1 - sigma."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, dataclasses.replace(step, time=1 - step.time), embedding, guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """Row by row: in a batch of different lengths the pipeline's rows depend on each other."""
    pictures = case.prompts.sources or [None, None]
    rows = []
    for x, text, row in zip(latents, case.prompts.required_texts, pictures, strict=True):
        arguments: dict[str, Any] = {**guided_arguments(case, 1), "output_resolution": SIDE}
        arguments["image"] = None if row is None else as_pil(row)
        packed = x[None].flatten(2).transpose(1, 2)
        rows.append(run_pipeline(bundle.processors["pipeline"], [text], packed, case, **arguments))
    steps = [torch.cat(row).transpose(1, 2).reshape(latents.shape) for row in zip(*(s for s, _ in rows), strict=True)]
    return [*steps], Media(images=on_white(torch.cat([output.images for _, output in rows])))


def family(folder: Path, cls: type[QwenImage21] = QwenImage21) -> QwenImage21:
    return cls(str(folder), picture_area=SIDE * SIDE)


def case(name: str, prompts: Media) -> Case:
    formulas = (NormKept, Unshifted, PicturesAfterPadding, TimeReversed)
    return Case(
        name=name,
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=96, width=64, guidance=3.0, negative_prompt=" "),
        reference=reference,
        prompts=prompts,
        wrong={cls.__doc__ or "": lambda folder, cls=cls: family(folder, cls) for cls in formulas},
    )


CASES = [
    case("qwen_image_2_1", Media(texts=list(TEXTS))),
    case("qwen_image_2_1_edit", Media(texts=list(TEXTS), sources=sources((TALL, WIDE), (WIDE, TALL)))),
]
