"""A tensor that is spread over ranks, seen from one of them; any other tensor is its own shard and its own whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

AnyTensor = TypeVar("AnyTensor", bound="torch.Tensor")


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


@contextmanager
def all_whole(module: torch.nn.Module) -> Iterator[None]:
    """The parameters of `module` as they would be on one rank, on each of the ranks, all of which must enter.

    For what looks at a module from outside, such as its `state_dict`: its forward is not to be used.
    """
    there = [(owner, *named) for owner in module.modules() for named in owner.named_parameters(recurse=False)]
    # One for each parameter, not for each name: what is tied stays so.
    wholes = {
        id(parameter): torch.nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
        for _, _, parameter in there
    }
    try:
        for owner, name, parameter in there:
            owner.register_parameter(name, wholes[id(parameter)])
        yield
    finally:
        for owner, name, parameter in there:
            owner.register_parameter(name, parameter)
