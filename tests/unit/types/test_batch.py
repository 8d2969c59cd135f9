"""Row operations: every kind of field stays aligned, and what does not fit is an error."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.types.same import assert_same
from unirl.types.batch import Rows, dense, listed, mapped, nested, packed, padded, shared


@dataclasses.dataclass(frozen=True, eq=False)
class Inner(Rows):
    marks: torch.Tensor = dense()
    names: list[str] = listed()


@dataclasses.dataclass(frozen=True, eq=False)
class Everything(Rows):
    """A field of every kind."""

    scores: torch.Tensor = dense()
    tokens: torch.Tensor = packed("lengths")
    lengths: torch.Tensor = dense()
    states: torch.Tensor = padded(mask="mask")
    mask: torch.Tensor = padded(mask="mask")
    sigmas: torch.Tensor = shared()
    label: str = shared()
    notes: list[Any] = listed()
    inner: Inner = nested()
    columns: dict[str, torch.Tensor] = mapped()
    maybe: torch.Tensor | None = dense(None)


def everything(lengths: list[int], width: int = 3, offset: int = 0, *, maybe: bool = False) -> Everything:
    """N rows whose every value names its row."""
    count, rows = len(lengths), torch.arange(len(lengths)) + offset
    per_token = torch.repeat_interleave(rows, torch.tensor(lengths, dtype=torch.long))
    return Everything(
        scores=rows[:, None] * torch.ones(2),
        tokens=per_token[:, None] * torch.ones(2),
        lengths=torch.tensor(lengths, dtype=torch.long),
        states=rows[:, None] * torch.ones(count, width) + 1,
        mask=torch.ones(count, width, dtype=torch.bool),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        label="one",
        notes=[{"row": row} for row in rows.tolist()],
        inner=Inner(marks=rows.float(), names=[str(row) for row in rows.tolist()]),
        columns={"a": rows.float(), "b": -rows[:, None].float()},
        maybe=rows.clone() if maybe else None,
    )


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@given(lengths=SIZES, maybe=st.booleans(), data=st.data())
def test_pieces_are_the_rows_that_select_would_take(lengths: list[int], maybe: bool, data: st.DataObject) -> None:
    batch = everything(lengths, maybe=maybe)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, len(lengths)], strict=True))
    for piece, (start, end) in zip(batch.split([end - start for start, end in bounds]), bounds, strict=True):
        assert_same(piece, batch.select(range(start, end)))


def test_a_piece_is_pickled_without_the_rest_of_the_batch() -> None:
    batch = everything([2] * 1000)
    assert len(pickle.dumps(batch.split([10, 990])[0])) < len(pickle.dumps(batch)) / 40


@given(lengths=SIZES, maybe=st.booleans(), data=st.data())
def test_joining_what_was_split_gives_it_back(lengths: list[int], maybe: bool, data: st.DataObject) -> None:
    batch = everything(lengths, maybe=maybe)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    pieces = batch.split(sizes)
    assert [len(piece) for piece in pieces] == sizes
    assert_same(Everything.concat(pieces), batch)


@given(lengths=SIZES, data=st.data())
def test_selected_rows_carry_everything_of_theirs(lengths: list[int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    chosen = everything(lengths).select(index)
    assert len(chosen) == len(index)
    assert chosen.scores[:, 0].tolist() == index
    assert chosen.lengths.tolist() == [lengths[row] for row in index]
    assert chosen.tokens[:, 0].tolist() == [row for row in index for _ in range(lengths[row])]
    assert chosen.notes == [{"row": row} for row in index]
    assert chosen.inner.names == [str(row) for row in index]
    assert chosen.columns["b"][:, 0].tolist() == [-row for row in index]
    assert chosen.states[:, 0].tolist() == [row + 1 for row in index]
    assert chosen.label == "one"


@given(lengths=SIZES, data=st.data())
def test_selecting_twice_is_selecting_once(lengths: list[int], data: st.DataObject) -> None:
    batch = everything(lengths)
    first = data.draw(st.permutations(range(len(lengths))))
    second = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
    assert_same(batch.select(first).select(second), batch.select([first[row] for row in second]))


def test_row_numbers_may_be_a_range_a_list_or_a_tensor() -> None:
    batch = everything([1, 2, 0])
    for index in (range(1, 3), [1, 2], torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)):
        assert batch.select(index).scores[:, 0].tolist() == [1, 2]
    assert len(batch.select([])) == 0


def test_joining_pads_the_shorter_rows_with_zeros_that_the_mask_names() -> None:
    joined = Everything.concat([everything([1], width=2), everything([1, 0], width=4, offset=1)])
    assert joined.states.tolist() == [[1, 1, 0, 0], [2, 2, 2, 2], [3, 3, 3, 3]]
    assert joined.mask.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]


def test_an_empty_batch_joins() -> None:
    batch = everything([2, 1])
    assert_same(Everything.concat([batch, batch.select([])]), batch)


def test_pickle_keeps_everything() -> None:
    batch = everything([2, 0, 1], maybe=True)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_pickle_keeps_every_dtype_and_the_strides_of_none(dtype: torch.dtype) -> None:
    marks = torch.arange(12).reshape(3, 4).T.to(dtype)
    assert_same(pickle.loads(pickle.dumps(Inner(marks, list("abcd")))), Inner(marks, list("abcd")))


def test_what_was_read_from_memory_that_is_not_ours_can_be_written_to() -> None:
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(Inner(torch.zeros(100), ["a"] * 100), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    assert frozen
    marks = pickle.loads(sent, buffers=frozen).marks
    marks += 1
    assert not any(frozen[0])


def test_to_moves_tensors_of_every_kind_and_leaves_the_rest() -> None:
    """On the meta device, which holds no numbers: a packed field would have to look at its lengths there."""

    @dataclasses.dataclass(frozen=True, eq=False)
    class Movable(Rows):
        scores: torch.Tensor = dense()
        sigmas: torch.Tensor = shared()
        label: str = shared()
        notes: list[str] = listed()
        inner: Inner = nested()
        columns: dict[str, torch.Tensor] = mapped()
        maybe: torch.Tensor | None = dense(None)

    inner = Inner(marks=torch.zeros(2), names=["a", "b"])
    batch = Movable(torch.zeros(2), torch.ones(3), "one", ["x", "y"], inner, {"a": torch.zeros(2)})
    moved = batch.to("meta")
    tensors = (moved.scores, moved.sigmas, moved.inner.marks, moved.columns["a"])
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert (moved.label, moved.notes, moved.inner.names, moved.maybe) == ("one", ["x", "y"], ["a", "b"], None)
    assert batch.scores.device.type == "cpu"


# What does not fit


def test_fields_of_different_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Inner: fields disagree on the number of rows: \{'marks': 2, 'names': 3\}"):
        Inner(marks=torch.zeros(2), names=["a", "b", "c"])


def test_a_shared_value_is_never_taken_for_rows() -> None:
    """Three sigmas beside three rows are not three rows, and beside two they are no error."""
    assert len(everything([1, 1])) == 2
    assert len(everything([1, 1, 1])) == 3


def test_packed_elements_must_add_up() -> None:
    batch = everything([2, 1])
    with pytest.raises(ValueError, match=r"Everything.tokens holds 3 elements, its lengths add up to 4"):
        dataclasses.replace(batch, lengths=torch.tensor([2, 2]))


def test_columns_of_a_map_must_be_equally_long() -> None:
    with pytest.raises(ValueError, match=r"columns of different length: \{'a': 2, 'b': 3\}"):
        dataclasses.replace(everything([1, 1]), columns={"a": torch.zeros(2), "b": torch.zeros(3)})


def test_a_batch_without_any_field_of_rows_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Nothing(Rows):
        label: str = shared()
        maybe: torch.Tensor | None = dense(None)

    with pytest.raises(ValueError, match="Nothing has no field that tells its number of rows"):
        Nothing(label="x")


@pytest.mark.parametrize("index", [[3], [-1], [0, 5]], ids=str)
def test_rows_out_of_range_are_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match="out of range for a batch of 3"):
        everything([1, 1, 1]).select(index)


@pytest.mark.parametrize("mask", [torch.tensor([True, False, True]), [True, False, True], torch.tensor([0.0, 2.0])])
def test_a_mask_is_not_taken_for_row_numbers(mask: Any) -> None:
    """As numbers, True and False are the rows 1 and 0."""
    with pytest.raises(ValueError, match=r"select takes row numbers, got torch\.(bool|float32)"):
        everything([1, 1, 1]).select(mask)


def test_sizes_must_add_up_to_the_batch() -> None:
    with pytest.raises(ValueError, match=r"sizes \[1, 1\] do not add up to the batch of 3 rows"):
        everything([1, 1, 1]).split([1, 1])


def test_zero_batches_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="cannot join zero batches of Everything"):
        Everything.concat([])


def test_a_field_that_only_some_batches_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Everything\.maybe is set in some of the batches to join and missing in others"
    ):
        Everything.concat([everything([1]), everything([1], maybe=True)])


@pytest.mark.parametrize(
    "change", [{"label": "two"}, {"sigmas": torch.tensor([1.0, 0.4, 0.0])}, {"sigmas": torch.ones(2)}]
)
def test_shared_values_that_differ_are_refused(change: dict[str, Any]) -> None:
    batch = everything([1, 1])
    with pytest.raises(ValueError, match=rf"Everything.{next(iter(change))} must be the same in all batches to join"):
        Everything.concat([batch, dataclasses.replace(batch, **change)])


def test_maps_of_different_keys_are_refused() -> None:
    batch = everything([1])
    with pytest.raises(ValueError, match=r"keys differ between the batches to join: \[\['a', 'b'\], \['a'\]\]"):
        Everything.concat([batch, dataclasses.replace(batch, columns={"a": torch.zeros(1)})])


def test_nested_batches_of_different_type_are_refused() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Other(Rows):
        marks: torch.Tensor = dense()

    @dataclasses.dataclass(frozen=True, eq=False)
    class Outer(Rows):
        inner: Rows = nested()

    inner = Inner(marks=torch.zeros(1), names=["a"])
    with pytest.raises(ValueError, match=r"Outer.inner: cannot join \['Inner', 'Other'\]"):
        Outer.concat([Outer(inner=inner), Outer(inner=Other(marks=torch.zeros(1)))])


def test_padding_without_a_mask_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Unmasked(Rows):
        states: torch.Tensor = padded(mask="mask")
        mask: torch.Tensor | None = padded(None, mask="mask")

    equal = Unmasked.concat([Unmasked(states=torch.ones(1, 3)), Unmasked(states=torch.zeros(2, 3))])
    assert equal.states.shape == (3, 3)
    with pytest.raises(ValueError, match=r"Unmasked.states: lengths \[2, 3\] cannot be joined without 'mask'"):
        Unmasked.concat([Unmasked(states=torch.ones(1, 3)), Unmasked(states=torch.zeros(2, 2))])


def test_a_batch_cannot_be_changed() -> None:
    batch = everything([1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.label = "two"  # type: ignore[misc]
