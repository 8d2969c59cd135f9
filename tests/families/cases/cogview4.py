"""CogView4, one prompt at a time: in a batch, its pipeline lets the padding of other prompts into a prompt's text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.cogview4 import CogView4
from unirl.models.random_weights.cogview4 import write
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class ShiftedTime(CogView4):
    """The model's time is the noise level, as in most families."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = super().schedule(bundle, sampling).sigmas
        return Schedule(sigmas=sigmas, times=1000 * sigmas[:-1])


@dataclasses.dataclass(frozen=True)
class PaddingIsContent(CogView4):
    """What joins rows of different length is not masked."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        assert embedding.mask is not None
        whole = dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))
        return super().predict(bundle, latents, step, whole, guidance)


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    """With the attention of inference, which the pipeline is loaded with."""
    pipeline = bundle.processors["pipeline"]
    ours = [block.attn1.processor for block in pipeline.transformer.transformer_blocks]
    for block in pipeline.transformer.transformer_blocks:
        block.attn1.set_processor(CogView4AttnProcessor())
    walks = [
        run_pipeline(pipeline, [text], latents[[row]], case) for row, text in enumerate(case.prompts.required_texts)
    ]
    for block, processor in zip(pipeline.transformer.transformer_blocks, ours, strict=True):
        block.attn1.set_processor(processor)
    steps = [torch.cat(rows) for rows in zip(*(latents for latents, _ in walks), strict=True)]
    return [*steps], Media(images=torch.cat([output.images for _, output in walks]))


def family(folder: Path) -> CogView4:
    return CogView4(str(folder))


CASES = [
    Case(
        name="cogview4",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=48, guidance=5.0),
        reference=reference,
        wrong={
            "time is the shifted level": lambda folder: ShiftedTime(str(folder)),
            "padding is content": lambda folder: PaddingIsContent(str(folder)),
        },
    )
]
