"""Lineage ids are paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.sample_id import ancestor_id, child_id, depth, parent_id, rollout_of, root_id


def test_an_id_spells_its_lineage() -> None:
    image = child_id(child_id(root_id(7, 2), 0), 3)
    assert image == "r7.p2/0/3"
    assert depth(image) == 2
    assert parent_id(image) == "r7.p2/0"
    assert [ancestor_id(image, level) for level in range(3)] == ["r7.p2", "r7.p2/0", "r7.p2/0/3"]
    assert rollout_of(image) == 7


@given(rollout=st.integers(0, 10**6), row=st.integers(0, 10**6), path=st.lists(st.integers(0, 99), max_size=4))
def test_ancestors_and_children_are_inverse(rollout: int, row: int, path: list[int]) -> None:
    lineage = [root_id(rollout, row)]
    for index in path:
        lineage.append(child_id(lineage[-1], index))
    last = lineage[-1]
    assert depth(last) == len(path)
    assert [ancestor_id(last, level) for level in range(len(path) + 1)] == lineage
    assert rollout_of(last) == rollout
    if path:
        assert parent_id(last) == lineage[-2]


def test_ids_of_different_lineage_differ() -> None:
    """`r1.p2/3` and `r12.p/3` or the like never meet."""
    ids = {root_id(r, p) for r in range(30) for p in range(30)}
    assert len(ids) == 900
    assert len({child_id(child_id(root_id(0, 0), i), j) for i in range(20) for j in range(20)}) == 400


def test_a_root_has_no_parent() -> None:
    with pytest.raises(ValueError, match=r"'r0\.p0' is a root and has no parent"):
        parent_id("r0.p0")


@pytest.mark.parametrize("level", [-1, 2])
def test_an_ancestor_that_is_not_there_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match=f"has no ancestor at depth {level}"):
        ancestor_id("r0.p0/1", level)


def test_negative_numbers_are_refused() -> None:
    for rollout, row in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="rollout and row must not be negative"):
            root_id(rollout, row)
    with pytest.raises(ValueError, match="a child index must not be negative, got -1"):
        child_id("r0.p0", -1)
