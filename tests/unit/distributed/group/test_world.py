"""What ranks say to each other, and that a failing rank does not leave the others waiting for ever."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import RankPool
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import World


def figures(info: RankInfo) -> tuple[list[float], list[float], bool, bool]:
    world = World.of(info, "cpu")
    own = float(info.dp_rank + 1)
    return world.total([own, 0.1]), world.highest([own, -own]), world.all(True), world.all(info.dp_rank == 0)


def test_one_rank_gets_back_what_it_says() -> None:
    assert figures(RankInfo(0, 1)) == ([1.0, 0.1], [1.0, -1.0], True, True)


def test_two_ranks_agree_on_sums_and_maxima(ranks: RankPool) -> None:
    assert ranks(2, figures) == [([3.0, 0.2], [2.0, -1.0], True, False)] * 2


def test_ranks_that_hold_copies_count_once(ranks: RankPool) -> None:
    assert ranks(4, figures, dp=2, tp=2) == [([3.0, 0.2], [2.0, -1.0], True, False)] * 4


def axes(info: RankInfo) -> dict[str, int]:
    mesh = World.of(info, "cpu").mesh
    assert mesh is not None
    return {name: mesh.get_local_rank(name) for name in ("pp", "dp", "ep", "sp", "tp")}


def test_the_mesh_numbers_its_ranks_as_rank_info_does(ranks: RankPool) -> None:
    found = ranks(4, axes, dp=2, sp=2)
    infos = [RankInfo(rank, 4, dp=2, sp=2) for rank in range(4)]
    assert found == [{"pp": 0, "dp": info.dp_rank, "ep": 0, "sp": info.sp_rank, "tp": 0} for info in infos]


def fails_on_rank_one(info: RankInfo) -> None:
    if info.rank == 1:
        raise FloatingPointError("rank 1 has a NaN")
    torch.distributed.barrier()


def test_the_failure_of_one_rank_is_the_one_that_is_told(ranks: RankPool) -> None:
    with pytest.raises(FloatingPointError, match="rank 1 has a NaN"):
        ranks(2, fails_on_rank_one)
