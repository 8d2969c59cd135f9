from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch

from tests.tiny_policy import context, policy, rewarded, rollout, train, trajectory
from unirl.algorithms.base import Needs
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.types.sample import Part

WHOLE = slice(None)


def stale(part: Part) -> Part:
    """`part` as if it had been made by an earlier version of the weights."""
    assert part.version is not None
    return dataclasses.replace(part, version=part.version - 1)


def test_far_steps_are_dropped_where_the_ratio_has_moved_with_the_advantage_and_only_there() -> None:
    backend = policy()
    part = rewarded(rollout(backend, group=4), [0.0, 1.0, 2.0, 3.0, 3.0, 2.0, 1.0, 0.0])
    own = context(backend)
    old = FlowDPPO().anchors(own, part, WHOLE)
    assert old is not None
    assert old.means is not None
    assert part.advantages is not None
    train(backend, FlowDPPO(), part)
    # The update has moved every row with its advantage; half of the rows now get the opposite one.
    part = dataclasses.replace(part, advantages=part.advantages * torch.tensor([1.0, -1.0] * 4))
    replay = backend.stage.replay(part, trajectory(part).sde_indices)
    kl = ((replay.means - old.means) ** 2 / (2 * replay.stds**2)).flatten(2).mean(2).detach()
    threshold = float(kl.median())
    output = FlowDPPO(kl_threshold=threshold).loss(own, part, WHOLE, old)
    torch.testing.assert_close(output.means["train/old_kl"], kl, rtol=1e-5, atol=0)
    assert part.advantages is not None
    ratio, advantages = (replay.log_probs - old.log_probs).exp(), part.advantages[:, None]
    far, moved = kl >= threshold, (ratio - 1) * advantages > 0
    for kind in (far & moved, far & ~moved, ~far & moved, ~far & ~moved):
        assert bool(kind.any())
    assert torch.equal(output.means["train/clip_fraction"] == 1.0, far & moved)
    expected = torch.where(far & moved, 0, -advantages * ratio)
    torch.testing.assert_close(output.losses, expected, rtol=1e-5, atol=1e-7)


def test_a_step_that_was_dropped_stays_in_the_denominator() -> None:
    """With a threshold that nothing passes after an update, what is left has the scale of the whole batch."""
    backend = policy()
    part = rewarded(rollout(backend), [0.0, 2.0, 4.0, 2.0])
    old = FlowDPPO().anchors(context(backend), part, WHOLE)
    train(backend, FlowDPPO(), stale(part))
    losses = FlowDPPO(kl_threshold=1e-30).loss(context(backend), part, WHOLE, old).losses
    assert losses.shape == (4, 3)
    assert int((losses == 0).sum()) > 0


@pytest.mark.parametrize("source", ["rollout", "replay"])
def test_old_means_are_replayed_wherever_the_old_log_probs_come_from(source: Literal["rollout", "replay"]) -> None:
    backend = policy()
    part = rewarded(rollout(backend))
    old = FlowDPPO(anchor=source).anchors(context(backend), part, slice(1, 3))
    assert old is not None
    assert old.means is not None
    assert old.means.shape == (4, 2, 1, 8, 8)
    torch.testing.assert_close(old.log_probs, trajectory(part).log_probs[:, 1:], rtol=1e-5, atol=1e-6)


def test_it_needs_a_trajectory_and_no_other_weights() -> None:
    assert FlowDPPO().needs == Needs(ema_rollout=False, reference=False, trajectory=True)


@pytest.mark.parametrize("settings", [{"kl_threshold": 0.0}, {"kl_threshold": -1.0}])
def test_a_threshold_that_drops_everything_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"kl_threshold must be positive, got {settings['kl_threshold']}"):
        FlowDPPO(**settings)
