"""Ranks that all play the driver: each computes the calls of all, does its own, and collects what all returned."""

from __future__ import annotations

from typing import Any

import torch

from unirl.distributed.group.dispatch import Call, collect, plan
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.remote import Remote


def driven(worker: Remote, method: str, *args: Any, **kwargs: Any) -> Any:
    """What a driver would be given by `handle.method(...)`, on every rank."""
    info, dispatch = worker.rank_info, type(worker).declared()[method]
    infos = [other_rank(info, rank) for rank in range(info.world_size)]
    calls = plan(dispatch, Call(args, kwargs), infos)
    own = None
    if info.rank in calls:
        call = calls[info.rank]
        own = getattr(worker, method)(*call.args, **call.kwargs)
    if info.world_size == 1:
        return collect(dispatch, {0: own}, infos)
    results: list[Any] = [None] * info.world_size
    torch.distributed.all_gather_object(results, own)
    return collect(dispatch, {rank: results[rank] for rank in calls}, infos)


def other_rank(info: RankInfo, rank: int) -> RankInfo:
    """`rank` of the slab of `info`."""
    return RankInfo(rank, info.world_size, dp=info.dp, tp=info.tp, pp=info.pp, sp=info.sp, ep=info.ep)
