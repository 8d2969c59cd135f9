"""The kernels by name, and what they have in common; their mathematics is in tests/numerics."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from unirl.sde.solver import SOLVERS
from unirl.sde.steps import Schedule
from unirl.sde.strategy import STRATEGIES, per_row, row_mean, upcast
from unirl.types.sampling import DiffusionSamplingParams


def test_every_name_that_a_recipe_may_give_has_a_kernel_and_a_solver() -> None:
    hints = get_type_hints(DiffusionSamplingParams)
    assert set(get_args(hints["strategy"])) == set(STRATEGIES)
    assert set(get_args(hints["solver"])) == set(SOLVERS)
    assert all(
        isinstance(torch.zeros(1, dtype=getattr(torch, name)), torch.Tensor)
        for name in get_args(hints["storage_dtype"])
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("level", [0.0, 0.5])
def test_maths_is_float32_or_float64_whatever_the_model_says(name: str, level: float) -> None:
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    step = Schedule(sigmas, sigmas[:-1]).at(torch.tensor([0, 0]))
    for state in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for velocity in (torch.float32, torch.bfloat16, torch.float64):
            x, v = torch.ones(2, 3, dtype=state), torch.ones(2, 3, dtype=velocity)
            strategy = STRATEGIES[name](level)
            kept = torch.float64 if state == torch.float64 else torch.float32
            mean, std = strategy.mean(x, v, step), strategy.std(step, x)
            assert mean.dtype == std.dtype == kept
            assert strategy.draw(mean, std, torch.ones(2, 3)).dtype == kept


def test_columns_and_means_over_rows() -> None:
    like = torch.zeros(2, 3, 4)
    assert per_row(torch.tensor([1.0, 2.0]), like).shape == (2, 1, 1)
    assert row_mean(torch.arange(24.0).reshape(2, 3, 4)).tolist() == [5.5, 17.5]
    assert upcast(torch.ones(1, dtype=torch.float16)).dtype == torch.float32
    assert upcast(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
