from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_policy import SAMPLING, context, last_gradient, policy, relative_difference, rows_of, train
from unirl.algorithms.base import Needs
from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.records import Records, RecordSampler
from unirl.rollout.supervised import SupervisedEncoder
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.sample import Part
from unirl.types.segment import CleanLatents

RECORDS = Records(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), ["one", "two"] * 4)


def batch(backend: FSDPBackend, number: int = 0) -> Part:
    return SupervisedEncoder(backend, SAMPLING).encode(RecordSampler(RECORDS, 8, seed=0).draw(number))


def losses(backend: FSDPBackend, part: Part, algorithm: FlowSFT) -> torch.Tensor:
    return algorithm.loss(context(backend), part, slice(0, 1), None).losses.detach()


def levels(algorithm: FlowSFT, count: int) -> torch.Tensor:
    """Noise levels of `count` records, sorted."""
    ids = [f"r0.p{row}" for row in range(count)]
    return algorithm._draws(ids, torch.zeros(count, 1))[0].sort().values


def test_draws_do_not_depend_on_the_rows_they_stand_with() -> None:
    backend, algorithm = policy(), FlowSFT(seed=1)
    part = batch(backend)
    whole = losses(backend, part, algorithm)
    assert whole.shape == (8, 1)
    turned = losses(backend, part.select([5, 2, 7]), algorithm)
    torch.testing.assert_close(turned, whole[[5, 2, 7]], rtol=1e-5, atol=0)


def test_the_gradient_does_not_depend_on_the_micro_batch() -> None:
    found = []
    for size in (None, 1, 2, 4):
        backend = policy()
        train(backend, FlowSFT(seed=1), batch(backend), micro_batch_size=size)
        found.append(last_gradient(backend))
    assert max(relative_difference(other, found[0]) for other in found[1:]) < 1e-6


def test_records_and_steps_draw_differently_and_seeds_too() -> None:
    ids = [f"r{step}.p{row}" for step in range(2) for row in range(4)]
    like = torch.zeros(8, 16)
    sigma, noise = FlowSFT(seed=1)._draws(ids, like)
    assert len(set(sigma.tolist())) == 8
    assert float((torch.cdist(noise, noise) + 100 * torch.eye(8)).min()) > 1.0
    again, other = FlowSFT(seed=1)._draws(ids[::-1], like), FlowSFT(seed=2)._draws(ids, like)
    assert torch.equal(again[0].flip(0), sigma)
    assert torch.equal(again[1].flip(0), noise)
    assert not (other[0] == sigma).any()


def test_uniform_levels_are_spread_evenly() -> None:
    """Largest gap between the empirical and the true distribution of 4,000 draws: below 1.63 / sqrt(n) at 1 %."""
    found = levels(FlowSFT(seed=0, timesteps="uniform"), 4000)
    assert float((found - torch.arange(4000) / 4000).abs().max()) < 1.63 / 4000**0.5


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.5, 1.5)])
def test_logit_normal_levels_have_a_normal_logit(mean: float, std: float) -> None:
    found = levels(FlowSFT(seed=0, logit_mean=mean, logit_std=std), 4000)
    below = torch.distributions.Normal(mean, std).cdf(torch.logit(found))
    assert float((below - torch.arange(4000) / 4000).abs().max()) < 1.63 / 4000**0.5


def test_the_shift_moves_levels_towards_noise() -> None:
    """3 s / (1 + 2 s): a half becomes three quarters."""
    plain, shifted = (levels(FlowSFT(seed=0, shift=shift), 100) for shift in (1.0, 3.0))
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain))
    assert bool((shifted > plain).all())


def test_pictures_become_latents_in_minus_1_to_1_and_captions_conditions_without_guidance() -> None:
    backend = policy()
    part = batch(backend)
    assert isinstance(part.segment, CleanLatents)
    assert part.media is not None
    assert part.media.images is not None
    torch.testing.assert_close(part.segment.latents, part.media.images[:, :1] * 2 - 1)
    assert part.guidance_branches.negative is None
    assert not part.generated


def test_it_learns_one_picture() -> None:
    backend = policy(total_steps=60)
    part = batch(backend)
    before = float(losses(backend, part, FlowSFT(seed=9)).mean())
    for _ in range(60):
        train(backend, FlowSFT(seed=1), part)
    assert float(losses(backend, part, FlowSFT(seed=9)).mean()) < 0.7 * before


def test_it_needs_nothing_but_records() -> None:
    assert FlowSFT(seed=0).needs == Needs(ema_rollout=False, reference=False, trajectory=False)
    with pytest.raises(AssertionError, match="trains on given latents"):
        losses(policy(), rows_of([1.0]), FlowSFT(seed=0))


@pytest.mark.parametrize("settings", [{"shift": 0.0}, {"logit_std": 0.0}])
def test_a_distribution_of_levels_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shift and logit_std must be positive"):
        FlowSFT(seed=0, **settings)
