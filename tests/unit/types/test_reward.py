"""Scores of a batch."""

from __future__ import annotations

import pytest
import torch

from unirl.types.reward import Scores


def test_zero_is_a_score_and_nan_is_none() -> None:
    scores = Scores(torch.tensor([0.0, float("nan"), -1.0]), {"r": torch.zeros(3)}, ["", "timed out", ""])
    assert scores.valid.tolist() == [True, False, True]
    assert scores.select([1]).causes == ["timed out"]


def test_columns_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match=r"fields disagree on the number of rows: \{'total': 2, 'components': 3"):
        Scores(torch.zeros(2), {"r": torch.zeros(3)}, ["", ""])
