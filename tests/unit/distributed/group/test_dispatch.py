from __future__ import annotations

import pytest
import torch

from unirl.distributed.group.dispatch import Call, Dispatch, collect, join, plan, shard, shard_sizes
from unirl.distributed.group.rank_info import RankInfo
from unirl.types.media import Media
from unirl.types.metric import maximum, mean, total, values
from unirl.types.reward import Failure, Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams

SAMPLING = DiffusionSamplingParams(steps=4, height=8, width=8)


def media(count: int) -> Media:
    return Media(
        texts=[f"text {row}" for row in range(count)], images=torch.arange(count * 12.0).reshape(count, 3, 2, 2)
    )


def sample(roots: int) -> Sample:
    """Roots with three images each."""
    prompts = Part(ids=[root_id(0, row) for row in range(roots)], metadata=[{"row": row} for row in range(roots)])
    request = Sample((prompts,)).fork(3, SAMPLING)
    filled = request.frontier.fill(media=media(3 * roots), segment=None, conditions=None, version=7)
    return request.with_frontier(filled)


def same(a: Media | None, b: Media | None) -> bool:
    assert a is not None
    assert b is not None
    assert a.images is not None
    assert b.images is not None
    return a.texts == b.texts and torch.equal(a.images, b.images)


def called(calls: list[Call | None]) -> list[Call]:
    return [call for call in calls if call is not None]


@pytest.mark.parametrize(
    ("count", "n", "sizes"),
    [(5, 1, [5]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (5, 4, [2, 1, 1, 1]), (5, 5, [1] * 5), (2, 5, [1, 1, 0, 0, 0])],
)
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(count, n, sizes):
    assert shard_sizes(count, n) == sizes


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("rows", range(1, 8))
def test_rows_split_over_n_ranks_and_joined_are_the_rows(rows, n):
    batch = media(rows)
    calls = shard((batch,), {}, n)
    assert len(calls) == n
    assert [len(call.args[0]) if call else 0 for call in calls] == shard_sizes(rows, n)
    assert same(join([call.args[0] for call in called(calls)]), batch)


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("roots", range(1, 6))
def test_a_sample_is_split_by_roots_with_all_their_descendants(roots, n):
    whole = sample(roots)
    pieces = [call.args[0] for call in called(shard((whole,), {}, n))]
    assert [len(piece.roots) for piece in pieces] == [size for size in shard_sizes(roots, n) if size]
    assert all(len(piece.frontier) == 3 * len(piece.roots) for piece in pieces)
    joined = join(pieces)
    assert [part.ids for part in joined.parts] == [part.ids for part in whole.parts]
    assert same(joined.frontier.media, whole.frontier.media)
    assert joined.frontier.version.tolist() == [7] * (3 * roots)


def test_ranks_without_rows_are_not_called():
    calls = shard((media(2),), {}, 5)
    assert [call is None for call in calls] == [False, False, True, True, True]


def test_one_rank_gets_the_very_batch_without_a_copy():
    batch = media(4)
    assert called(shard((batch,), {}, 1))[0].args[0] is batch
    assert join([batch]) is batch


def test_only_the_first_batch_is_split_and_all_else_is_the_same_for_all():
    first, second = media(4), media(2)
    calls = called(shard(("a", first, second), {"flag": True}, 2))
    assert [call.args[1].texts for call in calls] == [["text 0", "text 1"], ["text 2", "text 3"]]
    assert all(call.args[0] == "a" and call.args[2] is second and call.kwargs == {"flag": True} for call in calls)


def test_a_keyword_argument_is_split_too():
    calls = called(shard((), {"version": 3, "batch": media(3)}, 2))
    assert [(call.kwargs["version"], len(call.kwargs["batch"])) for call in calls] == [(3, 2), (3, 1)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_scattered_call_without_rows_is_refused_on_any_number_of_ranks(n):
    with pytest.raises(ValueError, match=r"Sample or Rows, got \['int', 'str'\]"):
        shard((1,), {"x": "y"}, n)
    with pytest.raises(ValueError, match="argument 0 is an empty Part"):
        shard((Part(ids=[], metadata=[]),), {}, n)


def test_metrics_are_merged_by_weight():
    merged = join([{"loss": mean(1.0, 3), "top": maximum(2), "n": total(3)}, {"loss": mean(5.0, 1), "top": maximum(1)}])
    assert values(merged) == {"loss": 2.0, "top": 2, "n": 3}


def test_scores_of_shards_are_joined_in_order():
    parts = [
        Scores(torch.tensor([float(i)]), {"a": torch.tensor([i * 2.0])}, [(Failure("a", f"cause {i}"),)])
        for i in range(3)
    ]
    joined = join(parts)
    assert joined.total.tolist() == [0, 1, 2]
    assert joined.components["a"].tolist() == [0, 2, 4]
    assert joined.causes == ["cause 0", "cause 1", "cause 2"]


def test_nothing_joins_to_nothing():
    assert join([None, None]) is None


@pytest.mark.parametrize("results", [[3.5], [[1], [2]], [{"loss": 3.5}]])
def test_a_result_that_cannot_be_joined_is_refused_for_one_rank_already(results):
    with pytest.raises(ValueError, match=r"must return a Sample, Rows, Metrics or None, got (float|list|dict)"):
        join(results)


def test_results_of_different_types_are_refused_with_their_types():
    with pytest.raises(ValueError, match=r"\['Media', 'NoneType'\]"):
        join([media(1), None])
    ranks = [RankInfo(rank, 2, dp=2) for rank in range(2)]
    with pytest.raises(ValueError, match=r"\['int', 'str'\]"):
        collect(Dispatch.BROADCAST, {0: 1, 1: "1"}, ranks)


def test_ranks_that_share_rows_get_the_same_shard_and_one_of_them_answers():
    ranks = [RankInfo(rank, 4, dp=2, tp=2) for rank in range(4)]
    calls = plan(Dispatch.DP_SCATTER, Call((media(3),), {}), ranks)
    assert {rank: call.args[0].texts for rank, call in calls.items()} == {
        0: ["text 0", "text 1"],
        1: ["text 0", "text 1"],
        2: ["text 2"],
        3: ["text 2"],
    }
    results = {rank: {"rows": total(len(call.args[0]))} for rank, call in calls.items()}
    assert values(collect(Dispatch.DP_SCATTER, results, ranks)) == {"rows": 3}


def test_broadcast_calls_all_and_returns_rank_zero_or_the_merged_metrics():
    ranks = [RankInfo(rank, 3, dp=3) for rank in range(3)]
    call = Call((1,), {"b": 2})
    assert plan(Dispatch.BROADCAST, call, ranks) == {0: call, 1: call, 2: call}
    assert collect(Dispatch.BROADCAST, {0: "zero", 1: "one", 2: "two"}, ranks) == "zero"
    metrics = {rank: {"m": mean(rank, 1)} for rank in range(3)}
    assert values(collect(Dispatch.BROADCAST, metrics, ranks)) == {"m": 1.0}


def test_rank_zero_calls_rank_zero_alone_and_takes_any_result():
    ranks = [RankInfo(rank, 3, dp=3) for rank in range(3)]
    call = Call((media(3),), {})
    assert plan(Dispatch.RANK_ZERO, call, ranks) == {0: call}
    assert collect(Dispatch.RANK_ZERO, {0: 3.5}, ranks) == 3.5


def test_a_collective_calls_ranks_without_rows_too_and_leaves_their_none_out():
    infos = [RankInfo(rank, 4, dp=4) for rank in range(4)]
    calls = plan(Dispatch.DP_COLLECTIVE, Call((sample(2), "x"), {}), infos)
    assert [call.args[0] is None for call in calls.values()] == [False, False, True, True]
    assert [call.args[1] for call in calls.values()] == ["x"] * 4
    filled = collect(Dispatch.DP_COLLECTIVE, {rank: call.args[0] for rank, call in calls.items()}, infos)
    assert filled.frontier.ids == sample(2).frontier.ids


def test_a_collective_without_results_is_none():
    infos = [RankInfo(rank, 2, dp=2) for rank in range(2)]
    assert collect(Dispatch.DP_COLLECTIVE, {0: None, 1: None}, infos) is None
