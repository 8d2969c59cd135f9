"""World: what the ranks of a slab say to each other. One rank talks to nobody, and needs no process group."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

import torch

from unirl.distributed.group.rank_info import RankInfo


def join(rank_info: RankInfo, rendezvous: str, *, device_type: str, timeout: float) -> None:
    """Start torch.distributed in this process, before the first worker is built; all ranks of the slab call it.

    rendezvous: `file:///path` on one node (no port is opened for it), `tcp://host:port` across nodes
    timeout:    seconds that a rank waits for the others, here and in every collective afterwards
    """
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )


def leave() -> None:
    """End what `join` has started."""
    torch.distributed.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class World:
    """Collectives of one rank. Every rank of the slab must take part in each of them.

    mesh: the ranks with dimensions pp, dp, ep, sp, tp; None for one rank
    """

    rank_info: RankInfo
    mesh: torch.distributed.DeviceMesh | None = None

    @classmethod
    def of(cls, rank_info: RankInfo, device_type: str) -> World:
        """The world of a process that has joined; one rank need not have."""
        if rank_info.world_size == 1:
            return cls(rank_info)
        sizes = (rank_info.pp, rank_info.dp, rank_info.ep, rank_info.sp, rank_info.tp)
        axes = ("pp", "dp", "ep", "sp", "tp")
        return cls(rank_info, torch.distributed.init_device_mesh(device_type, sizes, mesh_dim_names=axes))

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each over the data-parallel ranks, in float64; ranks that hold copies count once."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM) if self.mesh is not None else list(values)

    def highest(self, values: Sequence[float]) -> list[float]:
        """The largest of each over the data-parallel ranks."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX) if self.mesh is not None else list(values)

    def all(self, flag: bool) -> bool:
        """Whether it is true on every data-parallel rank."""
        return self.highest([float(not flag)]) == [0.0]

    def _reduced(self, values: Sequence[float], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        assert self.mesh is not None
        tensor = torch.tensor(list(values), dtype=torch.float64)
        torch.distributed.all_reduce(tensor, operation, group=self.mesh.get_group("dp"))
        return tensor.tolist()
