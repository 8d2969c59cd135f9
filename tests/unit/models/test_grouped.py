"""Forwards by group: the order of rows, as many as other ranks do, and that what is done for them has no influence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.ranks import RankPool
from tests.tiny_policy import SMALL
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.base import Bundle
from unirl.models.diffusion.grouped import in_groups, in_ways
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.sharding import Sharding

X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def bundle(agreed: Callable[[Sequence[int]], list[int]] = list) -> Bundle:
    return Bundle(torch.nn.Identity(), agreed=agreed)


def squares(x: torch.Tensor, calls: list[list[int]]) -> Callable[[list[int]], torch.Tensor]:
    def forward(rows: list[int]) -> torch.Tensor:
        calls.append(rows)
        return x[rows] ** 2

    return forward


def test_each_group_is_one_forward_and_rows_keep_their_places() -> None:
    calls: list[list[int]] = []
    found = in_groups(bundle(), ["b", "a", "b", "c"], squares(X, calls))
    assert calls == [[0, 2], [1], [3]]
    assert found.tolist() == [1.0, 4.0, 9.0, 16.0]


def test_a_rank_of_fewer_groups_repeats_a_row_that_adds_a_gradient_of_zero() -> None:
    calls: list[list[int]] = []
    x = X.clone().requires_grad_()
    found = in_groups(bundle(lambda counts: [count + 2 for count in counts]), ["a", "b", "a", "a"], squares(x, calls))
    assert calls == [[0, 2, 3], [1], [0], [0]]
    assert found.tolist() == [1.0, 4.0, 9.0, 16.0]
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_a_way_that_no_row_takes_is_gone_in_its_turn_and_changes_no_value() -> None:
    calls: list[list[int]] = []
    scale = torch.ones((), requires_grad=True)

    def infinite(rows: list[int]) -> torch.Tensor:
        calls.append([-1])
        return scale * X[rows] / 0

    forwards = [infinite, squares(X, calls)]
    found = in_ways(bundle(lambda counts: [max(1, count) for count in counts]), [(1, None)] * 4, forwards)
    assert calls == [[-1], [0, 1, 2, 3]]
    assert found.tolist() == [1.0, 4.0, 9.0, 16.0]
    assert found.requires_grad
    in_ways(bundle(), [(1, None)] * 4, forwards)
    assert calls == [[-1], [0, 1, 2, 3], [0, 1, 2, 3]]


def asked(info: RankInfo, mode: str) -> list[list[int]]:
    """What ranks agree on: while they train, during a rollout, and after it."""
    config = DiffusionBackendConfig(sharding=Sharding(mode=mode))  # type: ignore[arg-type]
    backend = FSDPBackend.on_rank(
        info, SMALL, config, device=torch.device("cpu"), seed=0, total_steps=1, with_reference=False
    )
    own, model = [info.rank, 1 - info.rank], backend.stage.bundle
    found = [model.agreed(own)]
    with backend.gathered():
        found.append(model.agreed(own[: info.rank]))  # they need not even ask alike
    return [*found, model.agreed(own)]


@pytest.mark.parametrize(("mode", "together"), [("full", [[1, 1], [1, 1]]), ("none", [[0, 1], [1, 0]])])
def test_ranks_agree_while_they_gather_weights_together(mode: str, together: list[list[int]], ranks: RankPool) -> None:
    assert ranks(2, asked, mode) == [[together[0], [], together[0]], [together[1], [1], together[1]]]
