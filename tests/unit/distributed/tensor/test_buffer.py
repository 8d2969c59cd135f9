"""Buffer: tensors as the bytes that Ray stores."""

from __future__ import annotations

import pickle

import pytest
import torch

from unirl.distributed.tensor.buffer import Buffer

TENSORS = {
    "float32": torch.tensor([[1.5, -2.0], [0.0, torch.inf]]),
    "bfloat16": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "int64": torch.arange(6).reshape(2, 3),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, -1j]),
    "a number": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, dtype=torch.int64),
    "rows of nothing": torch.zeros(2, 0, 3),
    "columns": torch.arange(6.0).reshape(2, 3)[:, 1:],
    "one column of one row": torch.arange(6.0).reshape(2, 3)[:1, ::3],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "one value for all rows": torch.tensor([7.0]).expand(4, 3, 1),
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_a_tensor_comes_back_as_it_was(name: str) -> None:
    tensor = TENSORS[name]
    back = stored(tensor).tensor()
    assert (back.dtype, back.shape, back.is_contiguous()) == (tensor.dtype, tensor.shape, True)
    assert back.tolist() == tensor.tolist()


def test_what_comes_back_may_be_written_to_and_what_is_stored_stays() -> None:
    buffer = stored(torch.arange(3.0))
    buffer.tensor().zero_()
    assert buffer.tensor().tolist() == [0.0, 1.0, 2.0]


def stored(tensor: torch.Tensor) -> Buffer:
    """Its Buffer as Ray gives it back: the array lies in memory that must not be written to."""
    parts: list[pickle.PickleBuffer] = []
    data = pickle.dumps(Buffer.of(tensor), protocol=5, buffer_callback=parts.append)
    twin = pickle.loads(data, buffers=[bytes(part) for part in parts])
    assert not twin.data.flags.writeable or not len(twin.data)
    return twin
