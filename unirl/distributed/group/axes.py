"""The parallel axes of a slab, and the ranks that they make of its devices."""

from __future__ import annotations

import dataclasses
from typing import Self

from unirl.distributed.group.rank_info import RankInfo


@dataclasses.dataclass(frozen=True)
class Axes:
    """Sizes of the parallel axes of a slab; the rest of its devices is data parallel."""

    tp: int = 1
    sp: int = 1
    ep: int = 1
    pp: int = 1

    @classmethod
    def of(cls, info: RankInfo) -> Self:
        """Those of a rank."""
        return cls(tp=info.tp, sp=info.sp, ep=info.ep, pp=info.pp)

    @property
    def used(self) -> dict[str, int]:
        """The sizes above 1."""
        return {name: size for name, size in dataclasses.asdict(self).items() if size > 1}

    @property
    def on_node(self) -> int:
        """Ranks that talk within every layer, and must share a node: tp x sp."""
        return self.tp * self.sp

    @property
    def product(self) -> int:
        """Ranks of one data-parallel coordinate."""
        return self.tp * self.sp * self.ep * self.pp

    def ranks(self, devices: int) -> tuple[RankInfo, ...]:
        """The ranks of a slab of that many devices; ValueError, with the nearest number that works, if it cannot be."""
        if devices < 1 or devices % self.product:
            below = devices // self.product * self.product
            nearest = f"{below} or {below + self.product}" if below else f"{self.product}"
            sizes = " x ".join(f"{name}={size}" for name, size in self.used.items())
            raise ValueError(
                f"placement.devices={devices} cannot be shared out to {sizes or 'ranks'}: the nearest that works is "
                f"{nearest}"
            )
        sizes = dataclasses.asdict(self) | {"dp": devices // self.product}
        return tuple(RankInfo(rank, devices, **sizes) for rank in range(devices))
