"""Gradients of many ranks: adding them up, and the norm of those that are spread in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from unirl.train.dtensor import by_mesh, local, whole


def add_up(gradients: Sequence[torch.Tensor], group: torch.distributed.ProcessGroup) -> None:
    """The sum over the ranks of `group` in the place of each, or of each shard, in a few large messages."""
    for bucket in _buckets([local(gradient) for gradient in gradients]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        torch.distributed.all_reduce(flat, group=group)
        for gradient, piece in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))


def clipped(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> float:
    """The norm of the whole gradient, on every rank; scaled down to `limit` where that is less."""
    groups = by_mesh([parameter for parameter in parameters if parameter.grad is not None])
    norms = [_norm(group) for group in groups]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, math.inf if limit is None else limit, norm)
    return float(norm)


def _norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _buckets(gradients: Sequence[torch.Tensor], elements: int = 2**24) -> Iterator[list[torch.Tensor]]:
    """Consecutive gradients of one dtype, at most so many elements together (more where one alone has more)."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(other.numel() for other in bucket) + gradient.numel() > elements
        if bucket and (full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
