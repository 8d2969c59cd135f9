"""A tensor as bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The bytes of a tensor, `(n,)` uint8: numpy has these for every dtype, bfloat16 included."""

    data: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        flat = tensor.detach().cpu().reshape(-1)
        # A view of one element may have any stride and still count as contiguous.
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """A copy: what Ray gives is the store's own memory, which all readers share and torch must never write to."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), self.data)
        return tensor
