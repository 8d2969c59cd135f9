"""Objects between ranks: everybody gets what all said, and everybody fails where one does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.ranks import RankPool
from unirl.distributed.group.exchange import Exchange
from unirl.distributed.group.rank_info import RankInfo


def told(info: RankInfo) -> tuple[list[str], int, str]:
    exchange = Exchange(info)
    words = exchange.all(lambda: f"rank {info.rank}")
    tenfold = exchange.through_zero(lambda: info.rank + 1, lambda numbers: [10 * number for number in numbers])
    return words, tenfold, exchange.together(lambda: f"own {info.rank}")


def test_one_rank_needs_no_process_group() -> None:
    assert told(RankInfo(0, 1)) == (["rank 0"], 10, "own 0")


def test_three_ranks_hear_each_other_in_their_order(ranks: RankPool) -> None:
    words = ["rank 0", "rank 1", "rank 2"]
    assert ranks(3, told) == [(words, 10, "own 0"), (words, 20, "own 1"), (words, 30, "own 2")]


class Unsendable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failures(info: RankInfo) -> list[Any]:
    """What this rank sees of the failures of others."""
    exchange, seen = Exchange(info), []

    def fail(*numbers: int, error: Exception) -> None:
        if info.rank in numbers:
            raise error

    def full() -> Exception:
        return OSError(28, "No space left on device")

    for attempt in (
        lambda: exchange.all(lambda: fail(1, 2, error=full())),
        lambda: exchange.together(lambda: fail(2, error=ValueError("bad shape"))),
        lambda: exchange.through_zero(lambda: fail(1, error=full()), lambda values: values),
        lambda: exchange.through_zero(lambda: None, lambda values: fail(0, error=KeyError("plan")) or values),
        lambda: exchange.all(lambda: fail(1, error=Unsendable(1, 2))),
    ):
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            told = f"{error.errno} {error.strerror}" if isinstance(error, OSError) else str(error)
            seen.append((type(error).__name__, told, vars(error).get("__notes__", [])))
    return [*seen, exchange.all(lambda: info.rank)]


def test_what_fails_on_one_rank_is_raised_on_all_with_its_type_and_the_lowest_rank(ranks: RankPool) -> None:
    first, second, third = ranks(3, failures)
    expected = [
        ("OSError", "28 No space left on device", ["on rank 1 of 3"]),
        ("ValueError", "bad shape", ["on rank 2 of 3"]),
        ("OSError", "28 No space left on device", ["on rank 1 of 3"]),
        ("KeyError", "'plan'", []),
        ("RuntimeError", "Unsendable: 1 and 2", ["on rank 1 of 3"]),
        [0, 1, 2],
    ]
    assert first == third == expected
    assert second == [*expected[:4], ("Unsendable", "1 and 2", ["on rank 1 of 3"]), [0, 1, 2]]


def in_a_thread_and_beside_it(info: RankInfo) -> tuple[list[int], list[int]]:
    """Two exchanges at once, in an order that differs between the ranks."""
    here, beside, heard = Exchange(info), Exchange(info), []

    def speak() -> None:
        time.sleep(0.05 * info.rank)
        heard.extend(beside.all(lambda: 10 + info.rank))

    thread = threading.Thread(target=speak)
    thread.start()
    time.sleep(0.05 * (1 - info.rank))
    said = here.all(lambda: info.rank)
    thread.join()
    return said, heard


def test_a_thread_may_exchange_while_the_training_does(ranks: RankPool) -> None:
    assert ranks(2, in_a_thread_and_beside_it) == [([0, 1], [10, 11])] * 2


def lonely(info: RankInfo) -> None:
    exchange = Exchange(info, timeout=2)
    if info.rank == 0:
        exchange.all(lambda: 0)


def test_a_rank_that_is_left_alone_ends_with_an_error(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError):
        ranks(2, lonely)
