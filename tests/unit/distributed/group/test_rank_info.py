from __future__ import annotations

import itertools

import pytest

from unirl.distributed.group.rank_info import RankInfo


def coordinates(info: RankInfo) -> tuple[int, int, int, int, int]:
    return info.pp_rank, info.dp_rank, info.ep_rank, info.sp_rank, info.tp_rank


def test_coordinates_count_through_the_mesh_with_tp_fastest_and_pp_slowest():
    sizes = {"dp": 3, "tp": 2, "pp": 2, "sp": 2, "ep": 2}
    seen = [coordinates(RankInfo(rank, 48, **sizes)) for rank in range(48)]
    assert seen == list(itertools.product(range(2), range(3), range(2), range(2), range(2)))


def test_the_example_of_the_docstring():
    info = RankInfo(rank=5, world_size=8, dp=4, tp=2)
    assert (info.dp_rank, info.tp_rank, info.speaks) == (2, 1, False)


def test_one_rank_speaks_for_each_dp_coordinate():
    infos = [RankInfo(rank, 24, dp=3, tp=2, pp=2, sp=2) for rank in range(24)]
    assert [info.dp_rank for info in infos if info.speaks] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0, "world_size": 8, "dp": 2, "tp": 2}, r"multiply to 4, but there are 8 ranks"),
        ({"rank": 0, "world_size": 0, "dp": 0}, r"at least 1, got \{'dp': 0\}"),
        ({"rank": 2, "world_size": 2, "dp": 2}, r"rank must be in 0\.\.1, got 2"),
        ({"rank": -1, "world_size": 1}, r"rank must be in 0\.\.0, got -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        RankInfo(**arguments)
