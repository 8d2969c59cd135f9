"""Micro-batches of a language model by tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_language import prompts_of, rows_of
from tests.tiny_language_policy import text
from unirl.train.stack.planner import Batch, TokenGeometry, plan
from unirl.types.sample import Part
from unirl.types.sample_id import parent_id


def part_of(prompts: list[int], responses: list[list[int]]) -> Part:
    """Prompts and their responses of these lengths."""
    return rows_of([[1] * size for size in prompts], [[[2] * size for size in own] for own in responses])


def planned(part: Part, *, seed: int = 0, **geometry: Any) -> list[list[Part]]:
    return plan(Batch.of(part, seed, ranks=1), TokenGeometry(**geometry))


def tokens(micro: Part) -> int:
    """Those of a forward: each distinct prompt once, and all responses."""
    prompts = dict(zip(map(parent_id, micro.ids), prompts_of(micro).lengths.tolist(), strict=True))
    return sum(prompts.values()) + int(text(micro).lengths.sum())


def ids(updates: list[list[Part]]) -> list[str]:
    return [name for update in updates for micro in update for name in micro.ids]


SIZES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=2, max_size=4)), min_size=1, max_size=4
)


@given(SIZES, st.integers(1, 40), st.integers(0, 3))
def test_every_row_is_in_one_micro_batch_which_exceeds_its_budget_only_as_a_lone_row(
    sizes: list[tuple[int, list[int]]], budget: int, seed: int
) -> None:
    part = part_of([prompt for prompt, _ in sizes], [own for _, own in sizes])
    [update] = planned(part, token_budget=budget, seed=seed)
    assert sorted(ids([update])) == sorted(part.ids)
    for micro in update:
        assert len(micro) == 1 or tokens(micro) <= budget
    parents = [parent_id(name) for name in ids([update])]
    runs = 1 + sum(one != other for one, other in itertools.pairwise(parents))
    assert runs == len(set(parents))


@given(SIZES, st.integers(1, 40))
def test_no_micro_batch_would_have_taken_the_next_row(sizes: list[tuple[int, list[int]]], budget: int) -> None:
    [update] = planned(part_of([p for p, _ in sizes], [own for _, own in sizes]), token_budget=budget)
    for micro, following in itertools.pairwise(update):
        assert tokens(Part.concat([micro, following.select([0])])) > budget


def test_a_prompt_counts_once_for_its_siblings() -> None:
    """A prompt of 10 with 4 responses of 5: 30 tokens, where rows by themselves would be 60."""
    part = part_of([10], [[5, 5, 5, 5]])
    assert [len(micro) for micro in planned(part, token_budget=30)[0]] == [4]
    assert [len(micro) for micro in planned(part, token_budget=29)[0]] == [3, 1]
    assert [len(micro) for micro in planned(part, token_budget=3)[0]] == [1, 1, 1, 1]


@pytest.mark.parametrize("geometry", [{}, {"micro_batch_size": 2}, {"token_budget": 20}])
def test_each_update_has_its_share_of_the_rows(geometry: dict[str, int]) -> None:
    part = part_of([3, 4, 5], [[6, 1, 3, 2], [2, 2, 8, 1], [7, 1, 1, 1]])
    updates = planned(part, num_updates_per_batch=3, **geometry)
    assert [sum(map(len, update)) for update in updates] == [4, 4, 4]
    assert sorted(ids(updates)) == sorted(part.ids)
    assert [{parent_id(name) for name in ids([update])} for update in updates] != [{"r0.p0"}, {"r0.p1"}, {"r0.p2"}]


def test_micro_batches_by_rows_have_siblings_next_to_each_other() -> None:
    part = part_of([3, 4], [[2, 2, 2, 2], [3, 3, 3, 3]])
    [update] = planned(part, micro_batch_size=4)
    assert [len({parent_id(name) for name in micro.ids}) for micro in update] == [1, 1]


def test_rows_without_a_reward_are_left_out_and_move_no_other() -> None:
    part = part_of([3, 4], [[6, 1, 3], [2, 2, 8]])
    whole = planned(part, token_budget=15)
    rewards = torch.tensor([0.0, math.nan, 0.0, 0.0, math.inf, 0.0])
    found = planned(dataclasses.replace(part, rewards=rewards), token_budget=15)
    gone = {part.ids[1], part.ids[4]}
    expected = [[name for name in micro.ids if name not in gone] for micro in whole[0]]
    assert [micro.ids for micro in found[0]] == [names for names in expected if names]


def test_two_sizes_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size=2 and token_budget=100 both say how large a micro-batch"):
        TokenGeometry(micro_batch_size=2, token_budget=100)
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        TokenGeometry(token_budget=0)
