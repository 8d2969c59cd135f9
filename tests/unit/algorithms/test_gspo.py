from __future__ import annotations

import math

import pytest
import torch

from tests.unit.algorithms.closed_form import outcome, responses_of
from tests.unit.algorithms.packed import f64
from unirl.algorithms.gspo import GSPO
from unirl.algorithms.token_policy import Tokens


def test_the_ratio_is_the_geometric_mean_over_the_tokens_of_a_response() -> None:
    """Responses of ratios (2, 8) and (3): s = 4 and 3. d/dlogp of -A s at each token is -A s / length."""
    found = outcome(GSPO(clip_low=0.5, clip_high=9.0), [2.0, 8.0, 3.0], [1.0, 1.0, -1.0], lengths=[2, 1])
    assert found.losses == pytest.approx([-4.0, -4.0, 3.0])
    assert found.gradient == pytest.approx([-4.0, -4.0, 3.0])  # both losses of a response go through both its tokens
    assert found.held == [False] * 3


def test_a_response_is_clipped_as_a_whole_though_no_token_alone_would_be() -> None:
    """Ratios 0.5 and 4.5: s = 1.5 in every token."""
    found = outcome(GSPO(clip_low=0.2, clip_high=0.2), [0.5, 4.5], [1.0, 1.0])
    assert found.losses == pytest.approx([-1.2, -1.2])
    assert found.gradient == [0.0, 0.0]
    assert found.held == [True, True]


def test_tokens_that_are_not_trained_do_not_enter_the_ratio() -> None:
    mask = torch.tensor([True, False, True])
    log_probs = f64(math.log(2), 5.0, math.log(8))
    own = GSPO(clip_high=9.0).policy_loss(
        Tokens(log_probs, f64(0, 0, 0), f64(1, 1, 1), responses_of([3], loss_mask=mask))
    )
    assert own.losses[mask].tolist() == pytest.approx([-4.0, -4.0])


def test_its_mean_is_over_responses_unless_a_recipe_says_otherwise() -> None:
    assert GSPO().aggregation == "seq-mean-token-mean"


def test_a_clip_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_low must be in \(0, 1\) and clip_high positive, got 2.0 and 0.0004"):
        GSPO(clip_low=2.0)
