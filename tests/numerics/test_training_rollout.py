"""Rollouts: a sample is its id, its prompt and the weights, not the batch it is made in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tiny_policy import SAMPLING, SMALL, policy, rollout, trajectory
from unirl.data.prompts import PromptRow, as_roots
from unirl.distributed.group.placement import Placement
from unirl.models.base import Bundle
from unirl.models.diffusion_pipeline import DiffusionPipeline
from unirl.models.tiny import TinySD3
from unirl.rollout.trainside import Trainside, TrainsideEngine
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ["one", "a handwritten two", "one", "three"]


def latents(part: Part) -> dict[str, torch.Tensor]:
    return dict(zip(part.ids, trajectory(part).latents, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 100])
def test_the_batch_size_of_the_engine_changes_no_sample(guidance: float, batch_size: int) -> None:
    backend = policy()
    whole = rollout(backend, prompts=PROMPTS, guidance=guidance)
    cut = rollout(backend, prompts=PROMPTS, guidance=guidance, engine=Trainside(batch_size=batch_size))
    assert cut.ids == whole.ids
    torch.testing.assert_close(trajectory(cut).latents, trajectory(whole).latents, rtol=0, atol=2e-5)
    torch.testing.assert_close(trajectory(cut).log_probs, trajectory(whole).log_probs, rtol=0, atol=2e-5)


def test_the_other_prompts_of_a_request_change_no_sample() -> None:
    """r0.p0 is the same row in both requests, beside a longer prompt or alone."""
    backend = policy()
    beside, alone = (latents(rollout(backend, prompts=prompts)) for prompts in (PROMPTS, PROMPTS[:1]))
    for sample_id in ("r0.p0/0", "r0.p0/1"):
        torch.testing.assert_close(alone[sample_id], beside[sample_id], rtol=0, atol=2e-5)


def test_a_group_is_varied_and_a_second_rollout_of_it_is_the_same_bit_for_bit() -> None:
    first, again = (rollout(policy(), prompts=["one"], group=8) for _ in range(2))
    assert torch.equal(trajectory(first).latents, trajectory(again).latents)
    final = trajectory(first).final.flatten(1)
    assert float((torch.cdist(final, final) + 100 * torch.eye(8)).min()) > 0.1


@pytest.mark.parametrize(
    ("change", "same"), [({"seed": 4}, False), ({"seed": 0}, False), ({"number": 1}, False), ({}, True)]
)
def test_noise_changes_with_the_seed_and_the_rollout(change: dict[str, Any], same: bool) -> None:
    base, other = (trajectory(rollout(policy(), **settings)) for settings in ({}, change))
    assert torch.equal(base.latents[:, 0], other.latents[:, 0]) == same


def test_one_initial_noise_of_a_group_still_walks_apart() -> None:
    segment = trajectory(rollout(policy(), prompts=["one", "one"], group=2, same_initial_noise=True))
    start = segment.latents[:, 0]
    assert torch.equal(start[0], start[1])
    assert torch.equal(start[2], start[3])
    assert not torch.equal(start[0], start[2])
    assert not torch.equal(segment.final[0], segment.final[1])


def test_rows_carry_the_version_of_the_weights_that_made_them() -> None:
    backend = policy()
    backend.version = 7
    part = rollout(backend)
    assert part.version is not None
    assert part.version.tolist() == [7] * 4


def test_each_distinct_prompt_is_encoded_once_and_reaches_its_own_rows() -> None:
    seen: list[list[str]] = []

    class Listening(TinySD3):
        def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
            seen.append(prompts.required_texts)
            return TinySD3.encode(self, bundle, prompts, sampling)

    backend = policy(Listening(**SMALL.__dict__))
    guided = dataclasses.replace(SAMPLING, guidance=4.5)
    conditions = DiffusionPipeline(backend.stage).encode(Media(texts=PROMPTS), guided)
    assert seen == [["one", "a handwritten two", "three"], [""]]
    assert conditions.negative is not None
    tokens = conditions.positive.tokens
    assert torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1])
    assert conditions.negative.tokens.tolist() == [[0, 0, 0]] * 4


def test_through_a_slab_the_engine_fills_the_request_it_was_given() -> None:
    request = Sample((as_roots([PromptRow("one"), PromptRow("two", {"answer": 2})], 0),)).fork(2, SAMPLING)
    with Placement(device="cpu").slab() as slab:
        backend = slab.spawn(
            FSDPBackend,
            SMALL,
            DiffusionBackendConfig(),
            device=torch.device("cpu"),
            seed=0,
            total_steps=1,
            with_reference=False,
        )
        filled = slab.spawn(TrainsideEngine, backend, Trainside(), DiffusionPipeline).generate(request)
    assert filled.roots is request.roots
    assert filled.frontier.ids == request.frontier.ids
    assert filled.frontier.metadata == [{}, {}, {"answer": 2}, {"answer": 2}]
    assert filled.frontier.sampling == SAMPLING
    assert torch.equal(trajectory(filled.frontier).latents, trajectory(rollout(policy())).latents)
    media = filled.frontier.media
    assert media is not None
    assert media.images is not None
    assert media.images.shape == (4, 3, 8, 8)
    assert 0.0 <= float(media.images.min()) <= float(media.images.max()) <= 1.0


def test_a_batch_size_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.batch_size must be at least 1 or null, got 0"):
        Trainside(batch_size=0)
