"""Tensors and a small policy that two or four ranks hold in shards, for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unirl.distributed.group.rank_info import RankInfo
from unirl.train.backend.state import moments_like, nested, tensors_of
from unirl.train.dtensor import whole
from unirl.train.ema import Shadow
from unirl.train.shards import ShardReader, ShardWriter

SHAPES = {"even": (4, 6), "uneven": (5, 3), "narrow": (1, 7), "bias": (6,), "scalar": (), "empty": (0, 3)}
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((0,), (Shard(0),)),
    "columns": ((0,), (Shard(1),)),
    "copies": ((0,), (Replicate(),)),
    "hybrid": ((2, 0), (Replicate(), Shard(0))),
    "both": ((2, 0), (Shard(0), Shard(1))),
}


def values(offset: float = 0.0) -> dict[str, torch.Tensor]:
    """Whole tensors, every element another."""
    return {name: offset + torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in SHAPES.items()}


def laid_out(tensors: dict[str, torch.Tensor], how: str, size: int) -> dict[str, torch.Tensor]:
    """These tensors over `size` ranks as `how` says; those that have not enough dimensions, or one rank, keep them."""
    if size == 1 or how == "plain":
        return tensors
    sizes, placements = PLACEMENTS[how]
    mesh = init_device_mesh("cpu", tuple(n or size // max(sizes[0], 1) for n in sizes))
    needed = 1 + max((p.dim for p in placements if isinstance(p, Shard)), default=-1)
    return {
        name: distribute_tensor(value, mesh, placements) if value.dim() >= needed else value
        for name, value in tensors.items()
    }


def write(info: RankInfo, folder: Path, how: str, background: bool) -> dict[str, Any]:
    writer = ShardWriter(info)
    writer.start(folder, laid_out(values(), how, info.world_size), {"mine": info.rank}, background=background)
    files = writer.finish()
    writer.close()
    return files


def read(info: RankInfo, folder: Path, how: str) -> dict[str, Any]:
    into = laid_out({name: torch.full_like(value, -1) for name, value in values().items()}, how, info.world_size)
    reader = ShardReader(folder)
    reader.read(into)
    return {name: whole(value.detach()) for name, value in into.items()}


class Branches(torch.nn.Module):
    """b is used when it is asked for; 3 rows do not divide over two ranks, nor 6 over four."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 3)) for _ in range(2))


class Policy:
    """Branches with AdamW and an EMA, sharded: full (FSDP2), hybrid, with tensor parallel below, or not (one rank)."""

    def __init__(self, info: RankInfo, how: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = Branches()
        if info.world_size > 1 and how != "none":
            self._shard(module, how, info.world_size)
        self.module, self.parameters = module, dict(module.named_parameters())
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        self.ema = Shadow(self.parameters)

    def train(self, steps: range, branches: str) -> None:
        for step in steps:
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            for branch in branches:
                self.module.get_submodule(branch)(inputs).square().mean().backward()
            self.optimizer.step()
            self.ema.update(0.5)

    def state(self) -> dict[str, Any]:
        moments = {
            name: dict(self.optimizer.state[p]) for name, p in self.parameters.items() if p in self.optimizer.state
        }
        return {"parameters": self.parameters, "optimizer": moments, "ema": self.ema.values}

    def whole_state(self) -> dict[str, torch.Tensor]:
        return {name: whole(value.detach()).clone() for name, value in tensors_of(self.state()).items()}

    def save(self, info: RankInfo, folder: Path) -> None:
        writer = ShardWriter(info)
        writer.start(folder, tensors_of(self.state()), {}, background=True)
        writer.finish()
        writer.close()

    def load(self, folder: Path) -> None:
        reader = ShardReader(folder)
        saved = nested(reader.outline(), reader.own(0))
        moments = moments_like(saved["optimizer"], self.parameters)
        reader.read(tensors_of({"parameters": self.parameters, "optimizer": moments, "ema": self.ema.values}))
        for name, entries in moments.items():
            self.optimizer.state[self.parameters[name]] = entries

    @staticmethod
    def _shard(module: Branches, how: str, size: int) -> None:
        if how == "full":
            mesh = init_device_mesh("cpu", (size,))
        else:
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
        if how == "tensor":
            for branch in (module.a, module.b):
                parallelize_module(branch, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            mesh = mesh["outer"]
        for branch in (module.a, module.b):
            fully_shard(branch, mesh=mesh)
