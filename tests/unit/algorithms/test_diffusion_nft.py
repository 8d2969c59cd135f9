from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tiny_policy import SMALL, context, policy, rewarded, rollout, rows_of, train, trajectory
from unirl.algorithms.base import AlgorithmOutput, Needs
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.models.base import Bundle
from unirl.models.tiny import TinySD3
from unirl.sde.steps import Step
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.types.condition import Embedding
from unirl.types.sample import Part
from unirl.types.steps import NoSteps

ODE: dict[str, Any] = {"sde": NoSteps(), "noise_level": 0.0, "solver": "dpmpp_2m"}
FREE = DiffusionNFT(kl_coef=0.0)


def graded(backend: FSDPBackend, number: int = 0, **sampling: Any) -> Part:
    """A rollout of 4 rows with advantages -5, 5, 0, 0: qualities 0, 1, 1/2, 1/2."""
    return rewarded(rollout(backend, number=number, **ODE, **sampling), [0.0, 10.0, 0.0, 0.0])


def with_opposite_advantages(part: Part) -> Part:
    assert part.advantages is not None
    return dataclasses.replace(part, advantages=-part.advantages)


def loss(
    backend: FSDPBackend, part: Part, algorithm: DiffusionNFT = FREE, columns: slice = slice(None)
) -> AlgorithmOutput:
    return algorithm.loss(context(backend), part, columns, None)


@pytest.fixture(scope="module")
def backend() -> FSDPBackend:
    return policy(ema=EMA(0.9), reference=True)


# Draws


def test_draws_do_not_depend_on_the_rows_they_stand_with_or_the_cut_of_columns(backend: FSDPBackend) -> None:
    part = graded(backend)
    whole = loss(backend, part).losses
    assert whole.shape == (4, 3)
    for row in range(4):
        for column in range(3):
            alone = loss(backend, part.select([row]), columns=slice(column, column + 1)).losses
            torch.testing.assert_close(alone, whole[row : row + 1, column : column + 1], rtol=1e-5, atol=1e-6)


def drawn(backend: FSDPBackend, part: Part) -> torch.Tensor:
    """|x_t - x_0| of each row and column: a fingerprint of times and noise."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watching(TinySD3):
        def predict(
            self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
        ) -> torch.Tensor:
            seen.append((latents.unflatten(0, (len(part), -1)), step.sigma.unflatten(0, (len(part), -1))))
            return SMALL.predict(bundle, latents, step, embedding, guidance)

    stage = dataclasses.replace(backend.stage, family=Watching(**SMALL.__dict__))
    FREE.loss(dataclasses.replace(context(backend), stage=stage), part, slice(None), None)
    latents, sigma = seen[-1]
    level = sigma[..., None, None, None]
    noise = (latents - (1 - level) * trajectory(part).final[:, None]) / level
    return torch.cat([sigma[..., None], noise.flatten(2)], dim=2)


def test_samples_and_rollouts_draw_different_noise_and_a_sample_always_the_same(backend: FSDPBackend) -> None:
    first, again, later = (drawn(backend, graded(backend, number)) for number in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    noises = torch.cat([first, later])[:, :, 1:].flatten(0, 1)
    assert len(noises) == 24
    distances = torch.cdist(noises, noises) + 100 * torch.eye(24)
    assert float(distances.min()) > 1.0
    assert float(noises.mean().abs()) < 0.1
    assert float(noises.std()) == pytest.approx(1.0, abs=0.1)


def test_each_sample_trains_on_distinct_times_of_its_own_schedule(backend: FSDPBackend) -> None:
    part = rewarded(rollout(backend, group=8, steps=5, **ODE))
    times = drawn(backend, part)[:, :, 0]
    grid = trajectory(part).sigmas[:-1]
    assert times.shape == (16, 4)
    for row in times:
        assert len(set(row.tolist())) == 4
        assert all((grid - time).abs().min() < 1e-6 for time in row)
    assert len({tuple(row.tolist()) for row in times}) > 8
    assert set(times.flatten().tolist()) == set(grid.tolist())


@pytest.mark.parametrize(("fraction", "steps", "columns"), [(0.99, 4, 3), (1.0, 4, 4), (0.5, 4, 2), (0.1, 4, 1)])
def test_the_share_of_trained_times(backend: FSDPBackend, fraction: float, steps: int, columns: int) -> None:
    part = rollout(backend, steps=steps, **ODE)
    assert DiffusionNFT(time_fraction=fraction).columns(part) == columns


# Old policy


def test_at_the_old_policy_the_loss_is_blind_to_quality() -> None:
    """v = v_old: both branches have one error e / w, so the loss is (A_max / beta) e / w for every quality."""
    backend = policy(ema=EMA(0.0, warmup="constant"))
    for number in range(2):
        part = graded(backend, number)
        losses = loss(backend, part).losses
        flipped = with_opposite_advantages(part)
        torch.testing.assert_close(loss(backend, flipped).losses, losses, rtol=1e-5, atol=0)
        train(backend, FREE, part)


def test_the_old_policy_is_the_shadow_and_follows_it() -> None:
    """Decay 0.999 leaves v_old behind, so that the loss sees the quality; once the shadow has caught up it does not."""
    backend = policy(ema=EMA(0.999, warmup="constant"))
    train(backend, FREE, graded(backend))
    part = graded(backend, 1)
    flipped = with_opposite_advantages(part)
    seen = loss(backend, flipped).losses.detach() - loss(backend, part).losses.detach()
    assert float(seen[:2].abs().min()) > 1e-4
    state = backend.state()
    for name, value in state["ema"].items():
        value.copy_(state["parameters"][name])
    torch.testing.assert_close(loss(backend, flipped).losses, loss(backend, part).losses, rtol=1e-5, atol=0)


def test_the_gradient_at_the_old_policy_pulls_good_rows_closer_and_pushes_bad_ones_away(backend: FSDPBackend) -> None:
    """d loss/dv = A_max 2 (2 q - 1) (v - u) sigma^2 / w: opposite for q = 0 and 1, none for 1/2."""
    part = graded(backend)
    words = backend.stage.bundle.transformer.get_parameter("backbone.proj_out.weight")

    def pull(advantages: list[float]) -> torch.Tensor:
        rows = dataclasses.replace(part, advantages=torch.tensor(advantages))
        return torch.autograd.grad(loss(backend, rows).losses.sum(), words)[0]

    good, bad, middling = pull([5.0] * 4), pull([-5.0] * 4), pull([0.0] * 4)
    torch.testing.assert_close(good, -bad, rtol=1e-4, atol=1e-4 * float(good.abs().max()))
    assert float(middling.abs().max()) < 1e-5 * float(good.abs().max())
    # Half the advantage, half the pull; beyond A_max it saturates.
    torch.testing.assert_close(pull([2.5] * 4), good / 2, rtol=1e-4, atol=1e-4 * float(good.abs().max()))
    assert torch.equal(pull([50.0] * 4), good)


def test_the_loss_is_scaled_by_a_max_over_beta_and_reported_without(backend: FSDPBackend) -> None:
    output = loss(backend, graded(backend), DiffusionNFT(kl_coef=0.0, beta=0.5, advantage_max=4.0))
    torch.testing.assert_close(output.losses, output.means["train/policy_loss"] * 8.0)
    assert output.means["train/quality"][:, 0].tolist() == [0.0, 1.0, 0.5, 0.5]


# Reference


def test_the_distance_to_the_reference_is_0_at_the_start_and_enters_with_its_weight_afterwards() -> None:
    backend, held = policy(ema=EMA(0.9), reference=True), DiffusionNFT(kl_coef=2.0)
    assert not loss(backend, graded(backend), held).means["train/kl"].any()
    train(backend, held, graded(backend))
    part = graded(backend, 1)
    output = loss(backend, part, held)
    assert float(output.means["train/kl"].min()) > 0.0
    torch.testing.assert_close(
        output.losses - loss(backend, part).losses, 2.0 * output.means["train/kl"], rtol=1e-3, atol=1e-6
    )


def test_other_weights_are_gone_when_the_loss_is_walked_back(backend: FSDPBackend) -> None:
    part = graded(backend)
    live = {name: value.clone() for name, value in backend.state()["parameters"].items()}
    loss(backend, part, DiffusionNFT(kl_coef=1.0))
    assert all(torch.equal(value, live[name]) for name, value in backend.state()["parameters"].items())


def test_it_samples_with_the_shadow_and_needs_no_trajectory() -> None:
    assert DiffusionNFT().needs == Needs(ema_rollout=True, reference=True, trajectory=False)
    assert FREE.needs == Needs(ema_rollout=True, reference=False, trajectory=False)
    with pytest.raises(AssertionError, match="trains on generated latents"):
        FREE.columns(rows_of([1.0]))
    assert FREE.anchors(context(policy(ema=EMA())), rows_of([1.0]), slice(None)) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"kl_coef": -1.0}, "kl_coef must not be negative, got -1.0"),
        ({"advantage_max": 0.0}, "advantage_max must be positive, got 0.0"),
        ({"time_fraction": 0.0}, r"time_fraction must be in \(0, 1\], got 0.0"),
        ({"time_fraction": 1.1}, r"time_fraction must be in \(0, 1\], got 1.1"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DiffusionNFT(**settings)
