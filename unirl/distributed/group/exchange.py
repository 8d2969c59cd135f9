"""Exchange: objects and failures that the ranks of a slab tell each other. One rank talks to nobody."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from unirl.distributed.group.rank_info import RankInfo

Value = TypeVar("Value")
Reply = TypeVar("Reply")


class Exchange:
    """Collectives of objects, on a process group of their own: a thread beside the training may use one.

    Made by every rank of the slab. Every rank takes part in each call. What fails on one rank is raised on all, with
    the type that it has there; of several failures that of the lowest rank.

    timeout: seconds that a rank waits for the others, whose work is part of each call
    """

    def __init__(self, rank_info: RankInfo, timeout: float = 1800) -> None:
        self.rank, self.size = rank_info.rank, rank_info.world_size
        self._group: Any = None
        if self.size > 1:
            limit = datetime.timedelta(seconds=timeout)
            self._group = torch.distributed.new_group(backend="gloo", timeout=limit)

    def all(self, work: Callable[[], Value]) -> list[Value]:
        """What `work` returns on each rank, in their order."""
        if self._group is None:
            return [work()]
        mine = _outcome(work)
        outcomes: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(outcomes, mine.sendable(), group=self._group)
        return self._values(outcomes, mine)

    def together(self, work: Callable[[], Value]) -> Value:
        """What `work` returns here, if it fails on no rank."""
        mine = _outcome(work)
        self.all(lambda: None if mine.error is None else _raised(mine.error))
        return mine.value

    def through_zero(self, work: Callable[[], Value], decide: Callable[[list[Value]], Sequence[Reply]]) -> Reply:
        """`work` on each rank, then `decide` on rank 0 with what they returned; it answers each rank in their order."""
        if self._group is None:
            return decide([work()])[0]
        mine, answer = _outcome(work), [None]
        if self.rank > 0:
            torch.distributed.gather_object(mine.sendable(), dst=0, group=self._group)
            torch.distributed.scatter_object_list(answer, None, src=0, group=self._group)
            return _only(answer)
        outcomes: list[Any] = [None] * self.size
        torch.distributed.gather_object(mine.sendable(), outcomes, dst=0, group=self._group)
        decided = _outcome(lambda: list(decide(self._values(outcomes, mine))))
        replies = [_Outcome(value=reply) for reply in decided.value or ()] or [decided.sendable()] * self.size
        torch.distributed.scatter_object_list(answer, replies, src=0, group=self._group)
        if decided.error is not None:
            raise decided.error
        return _only(answer)

    def _values(self, outcomes: Sequence[_Outcome], mine: _Outcome) -> list[Any]:
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                # This rank's own failure keeps its traceback, which a copy has lost.
                error = mine.error if rank == self.rank and mine.error is not None else outcome.error
                error.add_note(f"on rank {rank} of {self.size}")
                raise error
        return [outcome.value for outcome in outcomes]


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one rank got: a value, or an error."""

    value: Any = None
    error: Exception | None = None

    def sendable(self) -> _Outcome:
        """With an error that another process can read."""
        if self.error is None:
            return self
        try:
            made_again = copy.copy(self.error)
            pickle.dumps(made_again)
        except Exception:  # noqa: BLE001 - an exception may refuse in any way to be copied; its text can be sent
            return _Outcome(error=RuntimeError(f"{type(self.error).__name__}: {self.error}"))
        return _Outcome(error=made_again)


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(value=work())
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return _Outcome(error=error)


def _raised(error: Exception) -> None:
    raise error


def _only(answer: Sequence[Any]) -> Any:
    if answer[0].error is not None:
        raise answer[0].error
    return answer[0].value
