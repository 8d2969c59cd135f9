"""FieldRef: row operations that move nothing give the rows that the same operations give on the values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.distributed.tensor.kept import Counting, brought, kept
from tests.unit.types.same import assert_same
from tests.unit.types.test_batch import Everything, Inner, everything
from unirl.distributed.tensor.field_ref import FieldRef, Span

LENGTHS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def cut(data: st.DataObject, count: int) -> list[int]:
    """Sizes of consecutive pieces of `count` rows, empty ones among them."""
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]


def sharded(data: st.DataObject, lengths: list[int]) -> tuple[Everything, FieldRef]:
    """Rows, and the reference to them where uneven shards keep them in parcels of some rows each."""
    rows = everything(lengths)
    return rows, kept(rows.split(cut(data, len(rows))), parcel_bytes=data.draw(st.sampled_from([1, 400, 2**20])))


def halves(ref: FieldRef) -> list[FieldRef]:
    middle = len(ref) // 2
    return [ref.select(range(middle)), ref.select(range(middle, len(ref)))]


@given(lengths=LENGTHS, data=st.data())
def test_a_reference_brings_the_rows_that_were_kept(lengths: list[int], data: st.DataObject) -> None:
    rows, ref = sharded(data, lengths)
    assert len(ref) == len(rows)
    assert_same(brought(ref), rows)


@given(lengths=LENGTHS, data=st.data())
def test_pieces_of_a_reference_are_the_pieces_of_its_rows(lengths: list[int], data: st.DataObject) -> None:
    rows, ref = sharded(data, lengths)
    sizes = cut(data, len(ref))
    for piece, own in zip(ref.split(sizes), rows.split(sizes), strict=True):
        assert_same(brought(piece), own)


@given(lengths=LENGTHS, data=st.data())
def test_joining_what_was_split_gives_the_same_reference_back(lengths: list[int], data: st.DataObject) -> None:
    rows, ref = sharded(data, lengths)
    sizes = cut(data, len(ref))
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    pieces = [ref.select(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    assert [len(piece) for piece in pieces] == sizes
    assert FieldRef.concat(pieces) == ref
    for piece, values in zip(pieces, rows.split(sizes), strict=True):
        assert_same(brought(piece), values)


@given(lengths=LENGTHS, data=st.data())
def test_selected_rows_are_those_of_the_values_repeated_and_reordered_ones_too(
    lengths: list[int], data: st.DataObject
) -> None:
    rows, ref = sharded(data, lengths)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    assert_same(brought(ref.select(index)), rows.select(index))
    again = data.draw(st.lists(st.integers(0, len(index) - 1), max_size=6)) if index else []
    assert_same(brought(ref.select(index).select(again)), rows.select([index[row] for row in again]))


def test_spans_next_to_each_other_are_one() -> None:
    """Rank 0 has 3 rows, rank 1 has 2: joined they are two spans, in any cut and joined again."""
    ref = kept([everything([1, 1, 1]), everything([1, 1], offset=3)])
    first, second = ref.parcels
    assert ref.spans == (Span(first, 0, 3), Span(second, 0, 2))
    assert ref.select([4, 0, 1]).spans == (Span(second, 1, 2), Span(first, 0, 2))
    assert FieldRef.concat([ref.select([row]) for row in range(5)]) == ref


def test_only_parcels_of_wanted_rows_are_asked_for() -> None:
    transport = Counting()
    ref = kept([everything([1] * 4, offset=4 * rank) for rank in range(3)], transport=transport)
    assert len(ref.parcels) == 3
    chosen = brought(ref.select([9, 1, 8]))
    assert chosen.scores[:, 0].tolist() == [9, 1, 8]
    assert [parcel.origin for parcel in transport.asked] == ["by rank 2", "by rank 0"]


def test_large_rows_are_kept_in_parcels_of_one_row_and_small_ones_together() -> None:
    inner = Inner(marks=torch.zeros(4, 250), names=list("abcd"))
    assert [parcel.rows for parcel in kept([inner], parcel_bytes=100).parcels] == [1] * 4
    assert [parcel.rows for parcel in kept([inner], parcel_bytes=3000).parcels] == [3, 1]
    assert [parcel.nbytes for parcel in kept([inner], parcel_bytes=2**20).parcels] == [4000]


def test_no_rows_are_brought_as_no_rows_of_their_kind() -> None:
    ref = kept([everything([2, 1])])
    for empty in (ref.select([]), kept([everything([2, 1]).select([])])):
        assert len(empty) == 0
        assert_same(brought(empty), everything([2, 1]).select([]))
    assert FieldRef.concat([ref.select([]), ref]) == ref


def test_copies_of_a_reference_are_equal_to_it() -> None:
    ref = kept([everything([2, 1]), everything([0], offset=2)])
    for twin in (pickle.loads(pickle.dumps(ref)), copy.deepcopy(ref)):
        assert twin == ref
        assert FieldRef.concat([twin.select([0]), ref.select([1, 2])]) == ref


def test_what_does_not_fit_is_refused_as_it_is_for_values() -> None:
    ref = kept([everything([2, 1])])
    with pytest.raises(ValueError, match=r"rows \[2\] are out of range for a batch of 2"):
        ref.select([2])
    with pytest.raises(ValueError, match=r"select takes row numbers, got torch\.bool"):
        ref.select(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"cannot join \['Everything', 'Inner'\]"):
        FieldRef.concat([ref, kept([everything([1]).inner])])


def test_a_field_that_is_read_where_it_is_not_is_named_with_the_way_to_bring_it() -> None:
    ref = kept([everything([2, 1])])
    with pytest.raises(AttributeError, match=r"'scores' of 2 rows that are kept elsewhere: bring them with `resolved"):
        _ = ref.scores
