"""Diffusers' own plans: the velocity of a whole forward on every rank, and gradients that make up its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.case import Case
from tests.families.conftest import ALL
from tests.ranks import RankPool
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import World
from unirl.models.base import Bundle, DiffusionFamily
from unirl.train.dtensor import local
from unirl.train.dtensor import whole as all_of
from unirl.types.condition import Embedding

pytestmark = pytest.mark.slow

MASKED = [case for case in ALL if case.name in ("qwen_image", "qwen_image_edit_2509", "qwen_image_edit_2511")]
PLANNED = [case for case in ALL if case.name.startswith(("flux1", "flux2", "wan"))] + MASKED
TENSOR = [case for case in ALL if case.name.startswith("qwen_image")]

Forward = tuple[torch.Tensor, dict[str, torch.Tensor]]


def forward(family: DiffusionFamily, bundle: Bundle, embedding: Embedding, case: Case) -> Forward:
    """Velocity of two rows at the first two steps, and the gradient of its mean square."""
    bundle.transformer.zero_grad(set_to_none=True)
    shape = family.latent_shape(bundle, case.sampling)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    step = family.schedule(bundle, case.sampling).at(torch.arange(2))
    velocity = family.predict(bundle, latents, step, embedding, case.sampling.guidance)
    velocity.square().mean().backward()
    named = bundle.transformer.named_parameters()
    return velocity.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def whole_and_split(
    info: RankInfo, name: str, family: DiffusionFamily, axis: str, dropped: int
) -> tuple[Forward, Forward]:
    """dropped: tokens at the end of the texts that are left out"""
    [case] = [case for case in ALL if case.name == name]
    bundle = family.load(torch.device("cpu"), torch.float32)
    bundle.transformer.requires_grad_(True)
    with torch.no_grad():
        embedding: Any = family.encode(bundle, case.prompts, case.sampling)
    if dropped:
        tokens, mask = embedding.tokens[:, :-dropped], embedding.mask[:, :-dropped]
        embedding = dataclasses.replace(embedding, tokens=tokens, mask=mask)
    whole = forward(family, bundle, embedding, case)
    world = World.of(info, "cpu")
    assert world.mesh is not None
    with pytest.MonkeyPatch.context() as patch:  # diffusers keeps these plans to accelerators, and they need none
        patch.setattr("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",))
        partial = family.split(bundle, axis, world.mesh[axis])
    split = forward(family, bundle, embedding, case)
    for parameter, gradient in split[1].items():
        if axis == "sp" or parameter in partial:
            torch.distributed.all_reduce(local(gradient))
    return whole, (split[0], {name: all_of(gradient) for name, gradient in split[1].items()})


def check(case: Case, checkpoint: Path, ranks: RankPool, axis: str = "sp", dropped: int = 0) -> None:
    pairs = ranks(2, whole_and_split, case.name, case.family(checkpoint), axis, dropped, **{axis: 2})
    for (velocity, gradients), (own, summed) in pairs:
        torch.testing.assert_close(own, velocity, rtol=0, atol=1e-5)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(summed[name] / largest, gradient / largest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_the_forward_is_that_of_one_rank(case: Case, checkpoint: Path, ranks: RankPool) -> None:
    check(case, checkpoint, ranks)


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_texts_of_any_length_are_split(case: Case, checkpoint: Path, ranks: RankPool) -> None:
    check(case, checkpoint, ranks, dropped=1)


@pytest.mark.parametrize("case", TENSOR, ids=str)
def test_the_forward_of_split_weights_is_that_of_one_rank(case: Case, checkpoint: Path, ranks: RankPool) -> None:
    check(case, checkpoint, ranks, "tp")


def test_the_facts_say_who_has_a_plan(case: Case, checkpoint: Path) -> None:
    there = {"sp": case in PLANNED, "tp": case in TENSOR}
    assert case.family(checkpoint).facts.plans == tuple(axis for axis in there if there[axis])
