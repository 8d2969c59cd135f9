"""Where a rank stands: the sizes of the parallel axes, and this rank's coordinate on each."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """One rank of a slab. Ranks are numbered with tp fastest, then sp, ep, dp, and pp slowest.

    `RankInfo(rank=5, world_size=8, dp=4, tp=2)` has dp_rank 2 and tp_rank 1.

    rank:       0 .. world_size - 1
    world_size: ranks of the slab, the product of the axes
    dp:         data parallel: each coordinate has rows of its own; ranks that differ in another axis only share theirs
    tp, pp, sp, ep: tensor, pipeline, sequence and expert parallel
    """

    rank: int
    world_size: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "sp": self.sp, "ep": self.ep}
        wrong = {name: size for name, size in sizes.items() if size < 1}
        if wrong:
            raise ValueError(f"the size of a parallel axis must be at least 1, got {wrong}")
        product = math.prod(sizes.values())
        if product != self.world_size:
            raise ValueError(f"the parallel axes {sizes} multiply to {product}, but there are {self.world_size} ranks")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {self.rank}")

    @property
    def tp_rank(self) -> int:
        """0 .. tp - 1."""
        return self.rank % self.tp

    @property
    def sp_rank(self) -> int:
        """0 .. sp - 1."""
        return self.rank // self.tp % self.sp

    @property
    def ep_rank(self) -> int:
        """0 .. ep - 1."""
        return self.rank // (self.tp * self.sp) % self.ep

    @property
    def dp_rank(self) -> int:
        """0 .. dp - 1."""
        return self.rank // (self.tp * self.sp * self.ep) % self.dp

    @property
    def pp_rank(self) -> int:
        """0 .. pp - 1."""
        return self.rank // (self.tp * self.sp * self.ep * self.dp)

    @property
    def speaks(self) -> bool:
        """True for the one rank of each dp coordinate whose result counts; the others hold a copy of it."""
        return (self.tp_rank, self.sp_rank, self.ep_rank, self.pp_rank) == (0, 0, 0, 0)
