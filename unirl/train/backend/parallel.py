"""One copy of the model over several ranks, by the plans that its library ships: tensor, sequence and expert parallel.

Its ranks have the same rows and do the same forwards; beside them, copies are data parallel (`sharding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from unirl.distributed.group.axes import Axes
from unirl.distributed.group.world import World
from unirl.models.base import Bundle, Family
from unirl.train.backend.gradients import add_up
from unirl.train.backend.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Split:
    """axis: tp, sp or ep, None where each rank does whole forwards; partial: see `Family.split`"""

    world: World
    axis: str | None = None
    partial: frozenset[str] = frozenset()

    @classmethod
    def of(cls, family: Family, bundle: Bundle, world: World) -> Split:
        """Split the model of `bundle`, before its weights are spread and an optimizer sees them."""
        for axis in Axes.of(world.rank_info).used:  # one at most: `refuse_ranks` comes first
            assert world.mesh is not None
            return cls(world, axis, family.split(bundle, axis, world.mesh[axis]))
        return cls(world)

    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Whole gradients where a rank has those of its own part alone; sharded ones stay so."""
        if self.axis is not None and self.partial:
            assert self.world.mesh is not None
            own = [parameters[name].grad for name in sorted(self.partial)]
            add_up([gradient for gradient in own if gradient is not None], self.world.mesh.get_group(self.axis))


def refuse_ranks(
    family: Family, sharding: Sharding, axes: Axes, *, devices: int | None, device_type: str | None
) -> None:
    """ValueError for ranks that cannot train the model together, as far as a recipe tells: no library is loaded.

    devices, device_type: None where they are what the machine has
    """
    name = type(family).__name__
    able = [axis for axis in family.facts.plans if axis != "tp" or device_type in (None, *family.tp_devices)]
    for axis, size in axes.used.items():
        if axis not in able:
            where = f" for {device_type}" if axis in family.facts.plans else ""
            raise ValueError(
                f"{name} cannot be split with {axis}={size}: its library ships no such plan{where}. It can be split "
                f"with {' or '.join(able) or 'no axis'}; set placement.{axis}=1"
            )
    if len(axes.used) > 1:
        raise ValueError(f"{name} is split over one axis beside data parallel, got {axes.used}: set the others to 1")
    if devices is not None and devices > 1:
        sharding.check(devices // axes.product * axes.sp)


def refuse_checkpoint(family: Family, axes: Axes) -> None:
    """ValueError, before weights are loaded, where the config of the checkpoint decides that it cannot be split."""
    for axis, size in axes.used.items():
        reason = family.split_refusal(axis, size)
        if reason is not None:
            raise ValueError(
                f"{type(family).__name__} cannot be split with {axis}={size}: {reason}; choose another placement.{axis}"
            )
