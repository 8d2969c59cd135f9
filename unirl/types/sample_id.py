"""Lineage ids. A root is `r{rollout}.p{row}`; child j of `x` is `x/j`; a group is the siblings of one parent.

`r7.p2/0/3` is the fourth image of the first rewrite of prompt row 2 of rollout 7. An id is given once, when a prompt
row is drawn, and never derived from content: equal text never merges two groups.
"""

from __future__ import annotations

from collections.abc import Sequence


def root_id(rollout: int, row: int) -> str:
    """The id of prompt row `row` of rollout `rollout`."""
    if rollout < 0 or row < 0:
        raise ValueError(f"rollout and row must not be negative, got rollout={rollout}, row={row}")
    return f"r{rollout}.p{row}"


def child_id(parent: str, index: int) -> str:
    """The id of child `index` of `parent`."""
    if index < 0:
        raise ValueError(f"a child index must not be negative, got {index}")
    return f"{parent}/{index}"


def parent_id(sample_id: str) -> str:
    """The id one level up."""
    parent, slash, _ = sample_id.rpartition("/")
    if not slash:
        raise ValueError(f"{sample_id!r} is a root and has no parent")
    return parent


def parent_ids(sample_ids: Sequence[str]) -> list[str]:
    """`parent_id` of each; all are of one depth."""
    if sample_ids:
        parent_id(sample_ids[0])
    return [sample_id.rpartition("/")[0] for sample_id in sample_ids]


def sibling_id(sample_id: str, index: int) -> str:
    """Number `index` beside `sample_id`: of the same parent, or for a root of the same rollout."""
    return root_id(rollout_of(sample_id), index) if "/" not in sample_id else child_id(parent_id(sample_id), index)


def depth(sample_id: str) -> int:
    """0 for a root, 1 for its children, and so on."""
    return sample_id.count("/")


def depths(sample_ids: Sequence[str]) -> set[int]:
    """The different depths that there are."""
    return {sample_id.count("/") for sample_id in sample_ids}


def ancestor_id(sample_id: str, level: int) -> str:
    """The ancestor at depth `level` (0 is the root); at its own depth, the id itself."""
    if not 0 <= level <= depth(sample_id):
        raise ValueError(f"{sample_id!r} has no ancestor at depth {level}")
    return "/".join(sample_id.split("/")[: level + 1])


def rollout_of(sample_id: str) -> int:
    """The rollout number that an id carries."""
    return int(sample_id.split(".", 1)[0].removeprefix("r"))
