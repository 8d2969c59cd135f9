"""Shapes of the pure layers are checked while tests run (pyproject.toml, --jaxtyping-packages)."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

from unirl.algorithms.losses import bounded_ratio
from unirl.sde.strategy import gaussian_kl, row_mean
from unirl.sde.trajectory import Replay


def test_a_wrong_shape_is_caught() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="other_mean"):
        gaussian_kl(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 1))


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        row_mean(torch.zeros(2, 3, dtype=torch.int64))


def test_fields_that_disagree_are_caught() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="means"):
        Replay(log_probs=torch.zeros(2, 3), means=torch.zeros(2, 4, 8), stds=torch.ones(2, 3, 1), dts=-torch.ones(3))


def test_losses_are_checked_too() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        bounded_ratio([0.0], torch.zeros(1))  # type: ignore[arg-type]
