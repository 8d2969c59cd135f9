"""A tensor that is spread over ranks, seen from one of them; any other tensor is its own shard and its own whole."""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in the storage of `tensor`."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it on this rank: a collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
