"""Requests, stages and the latents that a transformer was given: what the tests of models share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unirl.models.base import Bundle, DiffusionFamily
from unirl.models.diffusion_stage import DiffusionStage
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams

CPU = torch.device("cpu")
PROMPTS = ["a red cat", "two blue dogs on a very long hill"]


def request_for(prompts: list[str], *, group: int = 1, **sampling: Any) -> Sample:
    """`group` images of each prompt, 32 x 32 in 4 steps unless `sampling` says otherwise."""
    settings = {"steps": 4, "height": 32, "width": 32, "seed": 3, **sampling}
    ids = [root_id(0, row) for row in range(len(prompts))]
    roots = Part(ids=ids, metadata=[{} for _ in ids], media=Media(texts=prompts))
    return Sample((roots,)).fork(group, DiffusionSamplingParams(**settings))


def stage_of(
    family: DiffusionFamily,
    bundle: Bundle,
    *,
    guidance_gradient: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> DiffusionStage:
    """A stage whose transformer trains as a whole."""
    bundle.transformer.requires_grad_(True)
    return DiffusionStage(family, bundle, guidance_gradient=guidance_gradient, compute_dtype=compute_dtype)


@contextmanager
def inputs_of(transformer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The latents of every forward inside the block, in order."""
    seen: list[torch.Tensor] = []

    def record(_: torch.nn.Module, __: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        seen.append(arguments["hidden_states"].detach().clone())

    handle = transformer.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that are there; they are taken away from the module."""
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found
