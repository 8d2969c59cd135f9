from __future__ import annotations

import math
from typing import Any

import pytest

from tests.tiny_policy import rows_of
from unirl.train.stack.planner import Batch, DiffusionGeometry, nearest_divisor, plan
from unirl.types.sample import Part


def rows(count: int, invalid: tuple[int, ...] = (), rollout: int = 0) -> Part:
    part = rows_of([0.0] * count, [math.nan if row in invalid else 0.0 for row in range(count)])
    return Part(
        ids=[f"r{rollout}.p0/{row}" for row in range(count)],
        metadata=part.metadata,
        rewards=part.rewards,
        advantages=part.advantages,
    )


def planned(part: Part, *, seed: int = 0, **geometry: Any) -> list[list[list[str]]]:
    """The ids of each micro-batch of each update."""
    return [
        [micro.ids for micro in update] for update in plan(Batch.of(part, seed, ranks=1), DiffusionGeometry(**geometry))
    ]


def flat(updates: list[list[list[str]]]) -> list[str]:
    return [sample_id for update in updates for micro in update for sample_id in micro]


# DiffusionGeometry


@pytest.mark.parametrize(
    ("total", "wanted", "nearest"), [(12, 5, 4), (12, 8, 6), (12, 7, 6), (12, 100, 12), (7, 3, 1), (7, 5, 7), (1, 4, 1)]
)
def test_the_nearest_divisor_is_the_smaller_of_two(total: int, wanted: int, nearest: int) -> None:
    assert nearest_divisor(total, wanted) == nearest


def test_rows_that_do_not_divide_into_updates_are_refused_with_the_nearest_number() -> None:
    with pytest.raises(ValueError, match=r"12 samples .* num_updates_per_batch=5 .* nearest that does is 4"):
        DiffusionGeometry(num_updates_per_batch=5).check(12)


def test_an_update_that_does_not_divide_into_micro_batches_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(ValueError, match=r"an update of 6 samples .* micro_batch_size=4; .* nearest that does is 3"):
        DiffusionGeometry(num_updates_per_batch=2, micro_batch_size=4).check(12)


@pytest.mark.parametrize("micro", [None, 1, 2, 3, 6])
def test_what_divides_is_accepted(micro: int | None) -> None:
    DiffusionGeometry(num_updates_per_batch=2, micro_batch_size=micro).check(12)


@pytest.mark.parametrize("name", ["num_updates_per_batch", "micro_batch_size", "replay_batch"])
def test_a_size_below_1_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DiffusionGeometry(**{name: 0})


# Plan


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 1, 2, 3, 4, 5])
def test_every_row_is_in_exactly_one_micro_batch_of_one_update(updates: int, micro: int | None) -> None:
    part = rows(12)
    found = planned(part, num_updates_per_batch=updates, micro_batch_size=micro)
    assert sorted(flat(found)) == sorted(part.ids)
    assert [sum(map(len, update)) for update in found] == [12 // updates] * updates
    size = micro or 12
    assert all(len(batch) == size for update in found for batch in update[:-1])


def test_the_last_micro_batch_may_be_smaller() -> None:
    assert [len(micro) for micro in planned(rows(7), micro_batch_size=3)[0]] == [3, 3, 1]


def test_invalid_rows_are_left_out_where_they_stood() -> None:
    """The other rows stay in the micro-batches of the plan without invalid rows."""
    whole = planned(rows(12), num_updates_per_batch=2, micro_batch_size=3)
    found = planned(rows(12, invalid=(0, 5, 7)), num_updates_per_batch=2, micro_batch_size=3)
    gone = {"r0.p0/0", "r0.p0/5", "r0.p0/7"}
    expected = [[[i for i in micro if i not in gone] for micro in update] for update in whole]
    assert found == [[micro for micro in update if micro] for update in expected]


def test_an_update_of_invalid_rows_alone_is_empty_and_keeps_its_place() -> None:
    whole = planned(rows(4), num_updates_per_batch=2)
    invalid = tuple(int(sample_id.rsplit("/", 1)[1]) for sample_id in whole[0][0])
    assert planned(rows(4, invalid), num_updates_per_batch=2) == [[], whole[1]]


def test_the_order_is_keyed_by_the_seed_and_the_rollout_and_nothing_else() -> None:
    base = flat(planned(rows(32)))
    assert base == flat(planned(rows(32))) == flat(planned(rows(32), num_updates_per_batch=2, micro_batch_size=4))
    numbers = [
        [int(sample_id.rsplit("/", 1)[1]) for sample_id in order]
        for order in (base, flat(planned(rows(32, rollout=1))))
    ]
    assert numbers[0] != numbers[1]
    assert base != flat(planned(rows(32), seed=1))
    assert numbers[0] != sorted(numbers[0])


def test_rows_that_do_not_divide_never_make_an_extra_update() -> None:
    with pytest.raises(AssertionError, match="7 rows are no 2 equal updates"):
        planned(rows(7), num_updates_per_batch=2)
