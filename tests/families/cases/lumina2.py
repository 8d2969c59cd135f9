"""Lumina2, with and without the renormalisation of guided velocities."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.families.case import Case, Reference, run_pipeline
from unirl.models.base import Bundle
from unirl.models.diffusion.lumina2 import Lumina2
from unirl.models.random_weights.lumina2 import write
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

LENGTH = 256  # tokens of a prompt: one a byte, 162 of the system prompt


@dataclasses.dataclass(frozen=True)
class InstructedNegative(Lumina2):
    """The system prompt stands before the negative prompt as well."""

    def encode_negative(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        return self.encode(bundle, prompts, sampling)


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(Lumina2):
    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


def family(folder: Path) -> Lumina2:
    return Lumina2(str(folder))


def plain(folder: Path) -> Lumina2:
    return Lumina2(str(folder), renormalise=False)


def reference(*, renormalise: bool) -> Reference:
    def run(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
        steps, output = run_pipeline(
            bundle.processors["pipeline"],
            case.prompts.required_texts,
            latents,
            case,
            cfg_normalization=renormalise,
            max_sequence_length=LENGTH,
        )
        return [*steps], Media(images=output.images)

    return run


SAMPLING = DiffusionSamplingParams(steps=4, height=48, width=64, guidance=4.0)
CASES = [
    Case(
        "lumina2",
        write,
        family,
        SAMPLING,
        reference(renormalise=True),
        wrong={
            "guidance without renormalisation": plain,
            "a system prompt before the negative prompt": lambda folder: InstructedNegative(str(folder)),
            "time is sigma": lambda folder: TimeIsSigma(str(folder)),
        },
    ),
    Case(
        "lumina2 plain",
        write,
        plain,
        SAMPLING,
        reference(renormalise=False),
        wrong={"guidance with renormalisation": family},
    ),
]
