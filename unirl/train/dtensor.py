"""A tensor that is spread over ranks, seen from one of them; any other tensor is its own shard and its own whole."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in the storage of `tensor`."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it on this rank: a collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Those that are spread over the same ranks in each list, as operations on many tensors at a time need them."""
    from torch.distributed.tensor import DTensor

    groups: dict[Hashable, list[AnyTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
