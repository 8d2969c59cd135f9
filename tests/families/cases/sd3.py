"""SD3, with and without its T5 encoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.families.case import Case, run_pipeline
from unirl.models.base import Bundle, Point
from unirl.models.diffusion.sd3 import SD3
from unirl.models.random_weights.sd3 import write
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams


@dataclasses.dataclass(frozen=True)
class SwappedBranches(SD3):
    """The unconditional branch takes the place of the conditional one."""

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, at: Point) -> torch.Tensor:
        return super().guide(unconditional, conditional, at)


@dataclasses.dataclass(frozen=True)
class TimeIsSigma(SD3):
    """The model time is not scaled."""

    def time(self, bundle: Bundle, sigma: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sigma


def reference(bundle: Bundle, latents: torch.Tensor, case: Case) -> tuple[list[torch.Tensor | None], Media]:
    pipeline = bundle.processors["pipeline"]
    steps, output = run_pipeline(pipeline, case.prompts.required_texts, latents, case, max_sequence_length=48)
    return [*steps], Media(images=output.images)


def family(folder: Path) -> SD3:
    return SD3(checkpoint=str(folder), max_sequence_length=48)


CASES = [
    Case(
        name="sd3",
        write=write,
        family=family,
        sampling=DiffusionSamplingParams(steps=4, height=32, width=32, guidance=4.5),
        reference=reference,
        silent=("transformer_blocks.1.attn.add_q_proj",),  # the last block reads its text stream and does not write it
        wrong={
            "one shift": lambda folder: dataclasses.replace(family(folder), schedule_table="shifted"),
            "branches swapped": lambda folder: SwappedBranches(str(folder), max_sequence_length=48),
            "time is sigma": lambda folder: TimeIsSigma(str(folder), max_sequence_length=48),
        },
    )
]
