"""A family as the contract test sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unirl.data.pictures import Picture
from unirl.models.base import Bundle, DiffusionFamily
from unirl.types.media import Media
from unirl.types.sampling import DiffusionSamplingParams

# Two prompts of different length: what padding does to a row shows.
TEXTS = ["a red cat", "two blue dogs on a very long hill"]
TOLERANCE = 1e-4

# Latents after each step in the layout of the family (None where the pipeline does not tell), and the final media.
Reference = Callable[[Bundle, torch.Tensor, "Case"], tuple[list[torch.Tensor | None], Media]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A family with tiny random weights.

    write:     makes a folder that the family loads; every parameter drawn anew, so that no initial zero hides a fault
    family:    the family on that folder
    sampling:  deterministic, guidance on
    reference: the library's own pipeline from the same x_T `(2, *latent)`, on the same modules
    prompts:   two rows
    wrong:     families with one formula wrong on purpose; each must miss by more than ten times the tolerance
    silent:    parameters that get no gradient by construction (name endings), such as a last block's text stream
    row_tolerance: of a row alone against the row beside a longer prompt
    """

    name: str
    write: Callable[[Path], Path]
    family: Callable[[Path], DiffusionFamily]
    sampling: DiffusionSamplingParams
    reference: Reference
    prompts: Media = dataclasses.field(default_factory=lambda: Media(texts=list(TEXTS)))
    wrong: dict[str, Callable[[Path], DiffusionFamily]] = dataclasses.field(default_factory=dict)
    silent: tuple[str, ...] = ()
    row_tolerance: float = 1e-5

    def __str__(self) -> str:
        return self.name


def run_pipeline(
    pipeline: Any, texts: list[str], latents: torch.Tensor, case: Case, **arguments: Any
) -> tuple[list[torch.Tensor], Any]:
    """A diffusers pipeline from x_T in ITS layout: its latents after each step, and its output.

    Covers the call that most pipelines share; `arguments` adds or replaces what is a pipeline's own.
    """
    steps: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        steps.append(state["latents"].clone())
        return {}

    pipeline.set_progress_bar_config(disable=True)
    sampling = case.sampling
    settings = {
        "prompt": list(texts),
        "height": sampling.height,
        "width": sampling.width,
        "num_inference_steps": sampling.steps,
        "guidance_scale": sampling.guidance,
        "latents": latents,
        "callback_on_step_end": keep,
        "output_type": "pt",
        **arguments,
    }
    with torch.no_grad():
        output = pipeline(**{name: value for name, value in settings.items() if value is not _LEAVE_OUT})
    return steps, output


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Picture):
    """The picture of a case, in whole levels."""

    levels: torch.Tensor

    def pixels(self) -> torch.Tensor:
        return (self.levels * 255).round() / 255


_LEAVE_OUT = object()
LEAVE_OUT: Any = _LEAVE_OUT  # for an argument of `run_pipeline` that a pipeline does not take
