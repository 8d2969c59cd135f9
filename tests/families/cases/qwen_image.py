"""Qwen-Image."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.families.case import LEAVE_OUT, Case, run_pipeline
from unirl.models.base import Bundle, Point, classifier_free
from unirl.models.diffusion.qwen_image import QwenImage, token_grid
from unirl.models.latents import pack, unpack
from unirl.models.random_weights.qwen_image import write
from unirl.sde.schedule import exponential_shift, pin, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class PlainGuidance(QwenImage):
    """The norm of a token is not kept."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return classifier_free(conditional, unconditional, at.guidance)


@dataclasses.dataclass(frozen=True)
class NormOfChannels(QwenImage):
    """The norm is that of a latent pixel, not of a token of four."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        guided = classifier_free(conditional, unconditional, at.guidance)
        return guided * conditional.norm(dim=1, keepdim=True) / guided.norm(dim=1, keepdim=True)


@dataclasses.dataclass(frozen=True)
class Unmasked(QwenImage):
    """Padding is read as text."""

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        embedding = super().encode(bundle, prompts, sampling)
        assert embedding.mask is not None
        return dataclasses.replace(embedding, mask=torch.ones_like(embedding.mask))


@dataclasses.dataclass(frozen=True)
class Unstretched(QwenImage):
    """The schedule does not end at the terminal sigma."""

    def schedule(self, bundle: Bundle, sampling: DiffusionSamplingParams) -> Schedule:
        sigmas = pin(exponential_shift(uniform_sigmas(sampling.steps), 0.7667))
        return Schedule(sigmas=sigmas, times=sigmas[:-1])


@dataclasses.dataclass(frozen=True)
class TimeInThousands(QwenImage):
    """The transformer multiplies by 1000 itself."""

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, dataclasses.replace(step, time=step.time * 1000), embedding, guidance)


def guided_arguments(case: Case, rows: int) -> dict[str, Any]:
    """What the Qwen-Image pipelines call the guidance."""
    return {
        "guidance_scale": LEAVE_OUT,
        "true_cfg_scale": case.sampling.guidance,
        "negative_prompt": [case.sampling.negative_prompt] * rows,
    }


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline, texts = bundle.processors["pipeline"], case.prompts.required_texts
    arguments = {**guided_arguments(case, len(texts)), "max_sequence_length": 64}
    steps, output = run_pipeline(pipeline, texts, pack(latents), case, **arguments)
    return [unpack(step, *token_grid(latents)[1:]) for step in steps], Media(images=output.images)


CASES = [
    Case(
        name="qwen_image",
        write=write,
        family=lambda folder: QwenImage(str(folder), max_sequence_length=64),
        sampling=DiffusionSamplingParams(steps=4, height=64, width=48, guidance=4.0, negative_prompt=" "),
        reference=reference,
        # The last block reads its text stream and does not write it.
        silent=("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
        wrong={
            name: lambda folder, make=make: make(str(folder), max_sequence_length=64)
            for name, make in {
                "guidance without the norm": PlainGuidance,
                "norm of a latent pixel": NormOfChannels,
                "no mask": Unmasked,
                "no terminal stretch": Unstretched,
                "time in thousands": TimeInThousands,
            }.items()
        },
    )
]
