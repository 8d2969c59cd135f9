"""One copy of the model over several ranks, by the plans that its library ships: tensor, sequence and expert parallel.

Its ranks have the same rows and do the same forwards; beside them, copies are data parallel (`sharding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import World
from unirl.models.base import Bundle, Family
from unirl.train.backend.gradients import add_up

_AXES = ("tp", "sp", "ep", "pp")


@dataclasses.dataclass(frozen=True)
class Split:
    """axis: tp, sp or ep, None where each rank does whole forwards; partial: see `Family.split`"""

    world: World
    axis: str | None = None
    partial: frozenset[str] = frozenset()

    @classmethod
    def of(cls, family: Family, bundle: Bundle, world: World) -> Split:
        """Split the model of `bundle`, before its weights are spread and an optimizer sees them."""
        for axis in _sizes(world.rank_info):  # one at most: `refuse_axes` comes first
            assert world.mesh is not None
            return cls(world, axis, family.split(bundle, axis, world.mesh[axis]))
        return cls(world)

    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Whole gradients where a rank has those of its own part alone; sharded ones stay so."""
        if self.axis is not None and self.partial:
            assert self.world.mesh is not None
            own = [parameters[name].grad for name in sorted(self.partial)]
            add_up([gradient for gradient in own if gradient is not None], self.world.mesh.get_group(self.axis))


def refuse_axes(family: Family, info: RankInfo, device_type: str) -> None:
    """ValueError, before weights are loaded, for axes over which the model cannot be split."""
    sizes, name = _sizes(info), type(family).__name__
    for axis, size in sizes.items():
        reason = family.split_refusal(axis, size, device_type)
        if reason is not None:
            able = [other for other in _AXES if family.split_refusal(other, size, device_type) is None]
            raise ValueError(
                f"{name} cannot be split with {axis}={size}: {reason}. Into {size} it can be split with "
                f"{', '.join(able) or 'no axis'}; set placement.{axis}=1"
            )
    if len(sizes) > 1:
        raise ValueError(f"{name} is split over one axis beside data parallel, got {sizes}: set the others to 1")


def _sizes(info: RankInfo) -> dict[str, int]:
    """The axes in use beside dp."""
    sizes = {"tp": info.tp, "sp": info.sp, "ep": info.ep, "pp": info.pp}
    return {axis: size for axis, size in sizes.items() if size > 1}
