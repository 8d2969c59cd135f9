"""The global random streams: continued, and left alone by evaluations."""

from __future__ import annotations

import random

import numpy as np
import torch

from unirl.train.rng import isolated_rngs, seed_rngs


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_seed_starts_all_streams_and_zero_is_a_seed_like_any_other() -> None:
    seen = []
    for seed in (0, 0, 17, 17):
        seed_rngs(seed)
        seen.append(draws())
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_what_an_isolated_block_draws_is_the_same_each_time_and_leaves_no_trace() -> None:
    seed_rngs(1)
    expected = [draws() for _ in range(3)]
    seed_rngs(1)
    assert draws() == expected[0]
    inside = []
    for count in (1, 5):
        with isolated_rngs(7):
            inside.append([draws() for _ in range(count)])
    assert inside[0][0] == inside[1][0]
    assert [draws() for _ in range(2)] == expected[1:]
