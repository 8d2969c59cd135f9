"""Advantages of packed responses from the values of a critic."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from unirl.types.sample import Part
from unirl.types.segment import TextSegment


def valued(rewards: list[float], values: list[list[float]], mask: list[bool] | None = None) -> Part:
    """Responses with the value before each of their tokens."""
    lengths = torch.tensor([len(row) for row in values])
    flat = torch.tensor([value for row in values for value in row])
    trained = torch.ones(len(flat), dtype=torch.bool) if mask is None else torch.tensor(mask)
    segment = TextSegment(
        tokens=torch.zeros(len(flat), dtype=torch.long),
        log_probs=torch.zeros(len(flat)),
        loss_mask=trained,
        lengths=lengths,
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
        values=flat,
    )
    ids = [f"r0.p0/{row}" for row in range(len(rewards))]
    return Part(ids=ids, metadata=[{} for _ in ids], segment=segment, rewards=torch.tensor(rewards))


def found(part: Part, **settings: Any) -> tuple[list[float], list[float]]:
    segment = part.compute_gae(**{"gamma": 1.0, "lam": 1.0, "whiten": False, **settings}).segment
    assert isinstance(segment, TextSegment)
    assert segment.advantages is not None
    assert segment.returns is not None
    return segment.advantages.tolist(), segment.returns.tolist()


def test_the_reward_stands_at_the_last_token_of_each_response() -> None:
    """gamma = 0.5, lam = 0.8. The first response: d3 = 2 - 1 = 1, d2 = 0 + 0.5 - 3 = -2.5, d1 = 1.5 - 0.5 = 1;
    A3 = 1, A2 = -2.5 + 0.4 = -2.1, A1 = 1 - 0.84 = 0.16. The second: -1 - 0.5."""
    advantages, returns = found(valued([2.0, -1.0], [[0.5, 3.0, 1.0], [0.5]]), gamma=0.5, lam=0.8)
    assert advantages == pytest.approx([0.16, -2.1, 1.0, -1.5])
    assert returns == pytest.approx([0.66, 0.9, 2.0, -1.0])


def test_undiscounted_with_lambda_1_every_return_is_the_reward() -> None:
    advantages, returns = found(valued([2.0, -1.0], [[0.5, 3.0, 1.0], [0.5]]))
    assert returns == [2.0, 2.0, 2.0, -1.0]
    assert advantages == [1.5, -1.0, 1.0, -1.5]


def test_with_lambda_0_a_token_is_worth_the_change_of_the_value() -> None:
    assert found(valued([2.0], [[0.5, 3.0, 1.0]]), lam=0.0)[0] == [2.5, -2.0, 1.0]


def test_the_reward_goes_to_the_last_trained_token_and_credit_passes_the_untrained_ones() -> None:
    """Tokens 2 and 4 are a tool's: the numbers are those of the response [0.5, 1.0]."""
    part = valued([2.0], [[0.5, 9.0, 1.0, 9.0]], mask=[True, False, True, False])
    whole = valued([2.0], [[0.5, 1.0]])
    for settings in ({"lam": 0.8, "gamma": 0.5}, {}):
        advantages, returns = found(part, **settings)
        assert (advantages[::2], returns[::2]) == found(whole, **settings)
        assert advantages[1::2] == returns[1::2] == [0.0, 0.0]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_trained_tokens_and_returns_are_unchanged() -> None:
    part = valued([2.0, -1.0], [[0.5, 3.0, 1.0], [0.5, 9.0]], mask=[True] * 4 + [False])
    plain, returns = found(part)
    white, same = found(part, whiten=True)
    kept = torch.tensor(plain[:4], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(white[:4]), ((kept - kept.mean()) / kept.std(correction=0)).float())
    assert white[4] == 0
    assert same == returns


def test_whitening_makes_no_advantages_of_rounding() -> None:
    """A critic that is right to 1e-6: the variance is taken as 1e-8 more than it is, as in TRL and verl."""
    white, _ = found(valued([1.0, 1.0], [[1.0, 0.999999], [1.0, 1.0]]), whiten=True)
    assert max(abs(value) for value in white) < 0.02


def test_a_response_without_a_reward_is_0_and_does_not_enter_the_statistics() -> None:
    part = valued([2.0, math.nan, -1.0], [[0.5, 3.0], [7.0], [0.5]])
    without = part.select([0, 2])
    for whiten in (False, True):
        advantages, returns = found(part, whiten=whiten)
        assert (advantages[2], returns[2]) == (0.0, 0.0)
        assert ([*advantages[:2], advantages[3]], [*returns[:2], returns[3]]) == found(without, whiten=whiten)


def test_no_trained_token_at_all_gives_zeros() -> None:
    assert found(valued([1.0], [[0.5, 0.5]], mask=[False, False]), whiten=True) == ([0.0, 0.0], [0.0, 0.0])


def test_rewards_and_values_come_first() -> None:
    part = valued([1.0], [[0.5]])
    segment = part.segment
    assert isinstance(segment, TextSegment)
    for early in (
        dataclasses.replace(part, rewards=None),
        dataclasses.replace(part, segment=dataclasses.replace(segment, values=None)),
    ):
        with pytest.raises(ValueError, match="needs responses with rewards and with the values of a critic"):
            early.compute_gae(gamma=1.0, lam=1.0, whiten=False)
