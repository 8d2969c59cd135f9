"""What keyed noise refuses; what it draws is in tests/numerics."""

from __future__ import annotations

import pytest
import torch

from unirl.sde.noise import StepNoise, initial_noise


def test_shapes_and_dtypes() -> None:
    ids = ["r0.p0/0", "r0.p0/1", "r0.p1/0"]
    for drawn in (initial_noise(ids, (2, 4), 0), StepNoise(ids, 0).draw((2, 4))):
        assert drawn.shape == (3, 2, 4)
        assert drawn.dtype == torch.float32
        assert drawn.device.type == "cpu"


def test_a_root_belongs_to_no_group_that_could_share_its_noise() -> None:
    with pytest.raises(ValueError, match=r"'r0\.p0' is a root and has no parent"):
        initial_noise(["r0.p0"], (2,), 0, same_in_group=True)


def test_successive_draws_differ() -> None:
    noise = StepNoise(["r0.p0/0"], 0)
    assert not torch.equal(noise.draw((4,)), noise.draw((4,)))
