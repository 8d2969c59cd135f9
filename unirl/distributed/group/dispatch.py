"""How the arguments of one call fan out over the ranks of a slab, and how their results become one.

Five roots over dp = 2 are shards of 3 and 2; two roots over dp = 4 are shards of 1 and 1, and two ranks are not called.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.distributed.group.rank_info import RankInfo
from unirl.types.batch import Rows
from unirl.types.metric import Metric, merge
from unirl.types.sample import Sample


class Dispatch(enum.Enum):
    """What a remote method declares.

    DP_SCATTER: the first argument that is a Sample or Rows is split over the data-parallel ranks (a Sample by its
                roots, Rows by rows), every other argument is the same for all. Results are joined: Sample and Rows
                end to end, Metrics merged, None. A rank without rows is not called.
    DP_COLLECTIVE: the same for a method in which the ranks wait for each other: a rank without rows is called with None
                in place of its share, and returns None.
    BROADCAST:  the same arguments for all ranks. All results must be of one type; rank 0's is the result, Metrics are
                merged.
    RANK_ZERO:  rank 0 alone is called.
    """

    DP_SCATTER = "dp_scatter"
    DP_COLLECTIVE = "dp_collective"
    BROADCAST = "broadcast"
    RANK_ZERO = "rank_zero"


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def plan(dispatch: Dispatch, call: Call, ranks: Sequence[RankInfo]) -> dict[int, Call]:
    """The arguments of each rank that is called, by rank."""
    if dispatch is Dispatch.RANK_ZERO:
        return {0: call}
    if dispatch is Dispatch.BROADCAST:
        return {info.rank: call for info in ranks}
    shards = shard(call.args, call.kwargs, ranks[0].dp, idle=dispatch is Dispatch.DP_COLLECTIVE)
    return {info.rank: piece for info in ranks if (piece := shards[info.dp_rank]) is not None}


def collect(dispatch: Dispatch, results: Mapping[int, Any], ranks: Sequence[RankInfo]) -> Any:
    """One result from those of the ranks that were called."""
    if dispatch is Dispatch.RANK_ZERO:
        return results[0]
    spoken = [results[info.rank] for info in ranks if info.speaks and info.rank in results]
    if dispatch is Dispatch.DP_SCATTER:
        return join(spoken)
    if dispatch is Dispatch.DP_COLLECTIVE:
        return join([result for result in spoken if result is not None] or spoken)
    _require_one_type([results[info.rank] for info in ranks])
    return merge(spoken) if all(_is_metrics(result) for result in spoken) else results[0]


def shard_sizes(count: int, n: int) -> list[int]:
    """`count` rows over `n` ranks: sizes differ by at most one, the larger ones first."""
    share, extra = divmod(count, n)
    return [share + (rank < extra) for rank in range(n)]


def shard(args: tuple[Any, ...], kwargs: dict[str, Any], n: int, *, idle: bool = False) -> list[Call | None]:
    """The arguments of `n` data-parallel ranks; None for each trailing rank that has no row.

    idle: such a rank is called all the same, with None in place of its share
    Raises ValueError where no argument can be split, or where it has no rows.
    """
    position, batch = _first_batch(args, kwargs)
    count = len(batch.roots) if isinstance(batch, Sample) else len(batch)
    if count == 0:
        raise ValueError(f"there are no rows to scatter: argument {position!r} is an empty {type(batch).__name__}")
    if n == 1:
        return [Call(args, kwargs)]
    sizes = shard_sizes(count, n)
    pieces = batch.split([size for size in sizes if size])
    calls: list[Call | None] = [_with_argument(args, kwargs, position, piece) for piece in pieces]
    return calls + [_with_argument(args, kwargs, position, None) if idle else None] * (n - len(pieces))


def join(results: Sequence[Any]) -> Any:
    """The results of consecutive shards as one; types that cannot be joined are refused for a single result, too."""
    _require_one_type(results)
    first = results[0]
    if first is None:
        return None
    if isinstance(first, Sample):
        return first if len(results) == 1 else Sample.concat(list(results))
    if isinstance(first, Rows):
        return type(first).concat(results)
    if all(_is_metrics(result) for result in results):
        return merge(results)
    raise ValueError(f"a scattered method must return a Sample, Rows, Metrics or None, got {type(first).__name__}")


def _first_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Sample | Rows]:
    for position, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Sample | Rows):
            return position, value
    given = [type(value).__name__ for value in (*args, *kwargs.values())]
    raise ValueError(f"a scattered call needs an argument that is a Sample or Rows, got {given or 'no arguments'}")


def _with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int | str, value: Any) -> Call:
    if isinstance(position, str):
        return Call(args, {**kwargs, position: value})
    return Call((*args[:position], value, *args[position + 1 :]), kwargs)


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(metric, Metric) for metric in value.values())


def _require_one_type(results: Sequence[Any]) -> None:
    names = [type(result).__name__ for result in results]
    if len({type(result) for result in results}) > 1:
        raise ValueError(f"the ranks returned results of different types: {names}")
