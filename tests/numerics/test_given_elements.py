"""Given elements (the first frame of image-to-video): no noise touches them, no log-prob, KL or loss counts them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.tiny_policy import (
    SMALL,
    last_gradient,
    policy,
    relative_difference,
    rewarded,
    rollout,
    train,
    trajectory,
)
from unirl.algorithms.diffusion_base import DiffusionAlgorithm
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.flow_sft import FlowSFT
from unirl.models.base import Bundle
from unirl.models.tiny import TinySD3
from unirl.sde.steps import Step
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.ema import EMA
from unirl.types.condition import Embedding
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import CleanLatents

GIVEN = torch.zeros(1, 8, 8, dtype=torch.bool)
GIVEN[:, :3] = True  # three rows of pixels
STRAY = 1e3
ALGORITHMS: dict[str, DiffusionAlgorithm] = {
    "grpo": FlowGRPO(clip_low=0.5, clip_high=0.5, kl_coef=10.0),
    "grpo_replay": FlowGRPO(clip_low=0.5, clip_high=0.5, kl_coef=10.0, kl="flow_grpo", anchor="replay"),
    "dppo": FlowDPPO(kl_threshold=1.0),
    "nft": DiffusionNFT(kl_coef=1.0),
    "sft": FlowSFT(seed=5),
}


@dataclasses.dataclass(frozen=True)
class Inpainting(TinySD3):
    """SMALL of which three rows of pixels are given, other ones for each prompt.

    stray: what the model says of the given elements is off by this much
    """

    layers: int = SMALL.layers
    heads: int = SMALL.heads
    head_dim: int = SMALL.head_dim
    embedding_dim: int = SMALL.embedding_dim
    stray: float = 0.0

    def encode(self, bundle: Bundle, prompts: Media, sampling: DiffusionSamplingParams) -> Embedding:
        tokens = super().encode(bundle, prompts, sampling).tokens
        given = (tokens[:, 0].float() / 20)[:, None, None, None].expand(-1, 1, 8, 8)
        return Embedding(tokens, weights=(~GIVEN).float(), given=given)

    def predict(
        self, bundle: Bundle, latents: torch.Tensor, step: Step, embedding: Embedding, guidance: float
    ) -> torch.Tensor:
        return super().predict(bundle, latents, step, embedding, guidance) + self.stray * GIVEN


def given_of(part: Part) -> torch.Tensor:
    """The given elements of each row, `(N, 24)`."""
    assert part.guidance_branches.positive.given is not None
    return part.guidance_branches.positive.given[:, GIVEN]


def batch(backend: FSDPBackend) -> Part:
    rewards = (0.0, 1.0, 2.0, 3.0, 5.0, 3.0, 1.0, 2.0)
    return rewarded(rollout(backend, number=1, group=4), rewards, scale="group_std")


def moved_policy(stray: float = 0.0) -> FSDPBackend:
    """A policy that has left its reference and its shadow."""
    backend = policy(Inpainting(stray=stray), reference=True, ema=EMA(0.9, warmup="constant"))
    train(backend, FlowGRPO(kl_coef=0.0), batch(backend))
    return backend


def step(name: str, stray: float = 0.0, **geometry: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of one update, and what it reports."""
    backend = moved_policy(stray)
    part = batch(backend)
    if name == "sft":
        part = dataclasses.replace(part, segment=CleanLatents(trajectory(part).final))
    report = values(train(backend, ALGORITHMS[name], part, **geometry))
    return last_gradient(backend), report


@pytest.mark.parametrize(
    "sampling", [{}, {"storage_dtype": "bfloat16"}, {"guidance": 3.0}, {"strategy": "cps"}], ids=str
)
def test_the_walk_leaves_given_elements_as_they_are(sampling: dict[str, Any]) -> None:
    part = rollout(policy(Inpainting(stray=STRAY)), **sampling)
    latents = trajectory(part).latents
    assert latents.shape[1] == 5
    expected = given_of(part).to(latents.dtype)
    assert len(expected.unique()) == 2
    for position in latents.unbind(1):
        assert torch.equal(position[:, GIVEN], expected)
    assert latents[:, :, ~GIVEN].unique().numel() > 100


def test_the_model_sees_given_elements_without_noise_on_the_forward_process() -> None:
    backend = policy(Inpainting())
    part = rollout(backend)
    x_0 = trajectory(part).final
    noise, sigma = torch.randn(len(part), 3, *x_0.shape[1:]), torch.tensor([0.1, 0.5, 1.0]).expand(len(part), 3)
    noisy = backend.stage.noised(part.guidance_branches, x_0, noise, sigma)
    for points in noisy.unbind(1):
        assert torch.equal(points[:, GIVEN], given_of(part))
    assert torch.equal(noisy[:, 2][:, ~GIVEN], noise[:, 2][:, ~GIVEN])


def test_a_log_prob_is_the_mean_over_what_is_generated() -> None:
    backend = policy(Inpainting(stray=STRAY))
    part = rollout(backend)
    segment = trajectory(part)
    with torch.no_grad():
        replay = backend.stage.replay(part, segment.sde_indices)
    x_next = segment.at(segment.sde_indices + 1)
    log_density = torch.distributions.Normal(replay.means, replay.stds).log_prob(x_next)
    torch.testing.assert_close(segment.log_probs, log_density[:, :, ~GIVEN].mean(-1), rtol=0, atol=1e-6)


def test_the_ratio_at_unchanged_weights_is_exactly_one() -> None:
    backend = policy(Inpainting())
    part = batch(backend)
    report = values(train(backend, FlowGRPO(kl_coef=0.0), part, replay_batch=1))
    assert report["train/ratio_deviation"] == 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_the_model_says_of_given_elements_changes_neither_loss_nor_gradient(name: str) -> None:
    gradient, report = step(name)
    stray_gradient, stray_report = step(name, STRAY)
    assert float(gradient.norm()) > 1e-3
    assert torch.equal(stray_gradient, gradient)
    assert stray_report == report


@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_keep_each_row_with_what_is_given_to_it(name: str) -> None:
    gradient, report = step(name)
    other, other_report = step(name, micro_batch_size=3)
    assert relative_difference(other, gradient) < 1e-6
    assert other_report["train/loss"] == pytest.approx(report["train/loss"], rel=1e-6, abs=1e-6)


def test_kl_is_the_mean_over_what_is_generated() -> None:
    backend = moved_policy(STRAY)
    part = batch(backend)
    steps = trajectory(part).sde_indices
    with torch.no_grad():
        now = backend.stage.replay(part, steps)
        with backend.reference():
            reference = backend.stage.replay(part, steps)
    expected = ((now.means - reference.means) ** 2 / (2 * now.stds**2))[..., ~GIVEN].mean()
    report = values(train(backend, FlowGRPO(kl_coef=1.0), part))
    assert float(expected) > 0
    assert math.isclose(report["train/kl"], float(expected), rel_tol=1e-5)


def test_supervised_regression_is_the_mean_over_what_is_generated() -> None:
    """A model that says 0 everywhere: the loss is the mean of `(eps - x_0)^2`."""
    backend = policy(Inpainting(predicts="velocity"))
    for parameter in backend.stage.bundle.transformer.parameters():
        parameter.data.zero_()
    part = rollout(backend)
    x_0 = torch.rand(len(part), 1, 8, 8)
    part = dataclasses.replace(part, segment=CleanLatents(x_0), advantages=torch.zeros(len(part)))
    algorithm = FlowSFT(seed=5)
    _, noise = algorithm._draws(part.ids, x_0)
    report = values(train(backend, algorithm, part))
    assert math.isclose(report["train/loss"], float(((noise - x_0) ** 2)[:, ~GIVEN].mean()), rel_tol=1e-5)
