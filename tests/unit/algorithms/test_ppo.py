from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import stored, undone
from tests.tiny_language_policy import language_policy, scored, text, train_text, written
from tests.tiny_policy import relative_difference, weights_of
from tests.unit.algorithms.closed_form import responses_of
from tests.unit.algorithms.packed import f64
from unirl.algorithms.base import GAE, Needs
from unirl.algorithms.ppo import PPO
from unirl.algorithms.token_policy import Tokens
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.critic import Critic
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.planner import TokenGeometry
from unirl.types.sample import Part

REWARDS = [0.0, 2.0, 4.0, 2.0]
PLAIN = GAE(gamma=1.0, lam=1.0, whiten=False)


def valued(backend: FSDPBackend, part: Part, **geometry: Any) -> Part:
    found = Critic(backend, TokenGeometry(**geometry)).valued(part)
    assert found is not None
    return found


def head(backend: FSDPBackend) -> torch.Tensor:
    """Weight and bias of the value head, end to end."""
    parameters = backend.state()["parameters"]
    return torch.cat([parameters["critic.weight"].flatten(), parameters["critic.bias"]])


def test_the_policy_loss_is_the_clipped_surrogate_and_the_critics_is_clipped_to_the_old_value() -> None:
    """Old value 1 and return 3, a clip of 0.5: at 1.2 both count alike, at 2 the clipped 1.5 is further away and holds
    the value, at 0 the free one pulls back."""
    values = f64(1.2, 2.0, 0.0).requires_grad_()
    segment = responses_of([3], values=f64(1, 1, 1), returns=f64(3, 3, 3))
    old = f64(1, 1, 1).log()
    tokens = Tokens(old + f64(1.0, 1.5, 0.5).log(), old, f64(2, 2, -2), segment, values)
    given = PPO(value_coef=0.1, value_clip=0.5).policy_loss(tokens)
    assert given.losses.tolist() == pytest.approx([-2.0, -2.4, 1.6])
    assert given.held.tolist() == [False, True, True]
    assert given.critic is not None
    assert given.critic.tolist() == pytest.approx([1.8**2 / 2, 1.5**2 / 2, 9 / 2])
    assert torch.autograd.grad(given.critic.sum(), values)[0].tolist() == pytest.approx([-1.8, 0.0, -3.0])
    assert given.critic_weight == 0.1


def test_it_asks_for_a_critic_and_says_what_is_made_of_its_values() -> None:
    assert PPO(gae=PLAIN).needs == Needs(values=PLAIN)
    assert PPO(kl_coef=0.1).needs == Needs(reference=True, values=GAE())


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_the_head_starts_at_0_and_is_trained_whole_in_float32(lora: LoRA | None) -> None:
    backend = language_policy(lora=lora, critic=True)
    part = scored(written(backend), REWARDS)
    part = PLAIN.of(valued(backend, part))
    assert torch.equal(head(backend), torch.zeros(17))
    assert torch.equal(text(part).values, torch.zeros(len(text(part).tokens)))  # type: ignore[arg-type]
    before = weights_of(backend)
    train_text(backend, PPO(gae=PLAIN), part)
    moved = {name for name, value in weights_of(backend).items() if not torch.equal(value, before[name])}
    assert {"critic.weight", "critic.bias"} < moved
    assert all("lora_" in name or name.startswith("critic.") for name in before) == (lora is not None)
    assert head(backend).dtype == torch.float32


def test_the_first_gradient_of_the_head_is_the_closed_form() -> None:
    """At value 0 and lambda 1 the return R of a token is its reward: d/db of `c mean((v - R)^2) / 2` is -c mean R."""
    backend = language_policy(critic=True)
    part = PLAIN.of(valued(backend, scored(written(backend), REWARDS)))
    report = train_text(backend, PPO(gae=PLAIN, value_coef=0.25), part)
    returns = torch.tensor(REWARDS).repeat_interleave(text(part).lengths)
    moment = float(backend.state()["optimizer"]["critic.bias"]["exp_avg"])
    assert moment == pytest.approx(-0.25 * float(returns.mean()), rel=1e-5)
    assert report["train/value_loss"].value == pytest.approx(float((returns**2).mean()) / 2, rel=1e-5)


def test_values_are_those_of_the_replay_whatever_the_cut(critic: FSDPBackend, rollout: Part) -> None:
    values = critic.stage.replay(rollout).values
    assert values is not None
    expected = values.detach()
    assert float(expected.std()) > 1e-3
    for geometry in ({}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"token_budget": 12}):
        torch.testing.assert_close(text(valued(critic, rollout, **geometry)).values, expected)


def test_a_value_is_that_of_the_text_before_its_token(critic: FSDPBackend, rollout: Part) -> None:
    """Siblings have read the same before their first token, and other tokens after it do not change its value."""
    values = text(valued(critic, rollout)).values
    assert values is not None
    lengths = text(rollout).lengths
    starts = lengths.cumsum(0) - lengths
    first = values[starts]
    torch.testing.assert_close(first[0], first[1])
    torch.testing.assert_close(first[2], first[3])
    assert abs(float(first[0] - first[2])) > 1e-4


def test_values_and_returns_are_frozen_for_all_updates_on_a_rollout(critic: FSDPBackend, rollout: Part) -> None:
    """The second update clips to the values of the rollout: with a tiny clip the head can no longer move."""
    part = PLAIN.of(valued(critic, rollout))
    frozen = text(part).values
    assert frozen is not None
    copy = frozen.clone()
    with undone(critic):
        train_text(critic, PPO(gae=PLAIN, value_clip=1e-6), part, num_updates_per_batch=2)
        assert torch.equal(frozen, copy)
        moved = text(valued(critic, rollout)).values
    assert moved is not None
    assert float((moved - copy).abs().max()) > 1e-3


def test_the_critic_learns_what_a_response_is_worth() -> None:
    backend = language_policy(critic=True, optimizer=AdamW(lr=2e-2))
    part = scored(written(backend, group=8), [0.0] * 8 + [2.0] * 8)
    for _ in range(60):
        part = PLAIN.of(valued(backend, part))
        train_text(backend, PPO(gae=PLAIN, value_coef=1.0, clip_low=1e-6, clip_high=1e-6), part)
    values = text(valued(backend, part)).values
    assert values is not None
    worth = torch.tensor([0.0] * 8 + [2.0] * 8).repeat_interleave(text(part).lengths)
    assert relative_difference(values, worth) < 0.25


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_the_head_is_saved_and_restored_and_not_exported(lora: LoRA | None, tmp_path: Path) -> None:
    from safetensors import safe_open

    backend = language_policy(lora=lora, critic=True)
    part = PLAIN.of(valued(backend, scored(written(backend), REWARDS)))
    train_text(backend, PPO(gae=PLAIN), part)
    other = language_policy(lora=lora, critic=True)
    folder = stored(backend, tmp_path / "saved")
    other.load(folder)
    assert torch.equal(head(other), head(backend))
    assert float(head(other).abs().max()) > 0
    backend.export(tmp_path / "exported", weights="live")
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    with safe_open(tmp_path / "exported" / name, "pt") as file:
        assert not [key for key in list(file.keys()) if "critic" in key]
    with pytest.raises(ValueError, match=r"unexpected \['critic.bias', 'critic.weight'\]"):
        language_policy(lora=lora).load(folder)


def test_without_a_head_there_are_no_values() -> None:
    backend = language_policy()
    part = written(backend)
    assert backend.stage.replay(part).values is None
    with pytest.raises(AssertionError, match="made without a critic"):
        backend.stage.values(part)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"value_coef": 0.0},
            "value_clip must be positive, got 0.0 and 0.5; without a critic it is GRPO",
        ),
        ({"value_clip": 0.0}, "value_clip must be positive, got 0.1 and 0.0"),
        ({"clip_low": 0.0}, "clip_low must be in"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PPO(**settings)


@pytest.mark.parametrize("settings", [{"gamma": 1.1}, {"lam": -0.1}])
def test_a_discount_outside_of_0_to_1_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\], got"):
        GAE(**settings)


@pytest.fixture(scope="module")
def critic() -> FSDPBackend:
    """With values that are not 0."""
    backend = language_policy(critic=True)
    assert backend.stage.bundle.critic is not None
    with torch.no_grad():
        for parameter in backend.stage.bundle.critic.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.5, parameter.numel()).view(parameter.shape))
    return backend


@pytest.fixture(scope="module")
def rollout(critic: FSDPBackend) -> Part:
    return scored(written(critic), REWARDS)
