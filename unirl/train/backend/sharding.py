"""How the trained weights are spread over the data-parallel ranks, and when their gradients are added up.

Losses are divided by the terms of the whole optimizer step before backward, so gradients are summed, never averaged.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from unirl.distributed.group.world import World
from unirl.models.base import Bundle
from unirl.train.backend.gradients import add_up


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Over several ranks; one rank holds the weights whole, whatever is said here.

    mode:     full    every rank keeps a part of each weight, gathered block by block (FSDP2)
              hybrid  the same among `group` ranks, with copies in the other groups
              none    every rank keeps all weights; gradients are summed once an optimizer step
    group:    ranks that share one copy in hybrid, such as those of a node
    blocks:   class names of the modules that are gathered together; None takes the family's
    dtype:    what a trained master is gathered in: itself, or rounded to the compute dtype, which halves the traffic
    sync:     sum gradients at each micro-batch (they stay sharded), or at the last one of a step (less traffic, and
              the whole gradient in memory); auto is last with LoRA and each without
    offload:  keep shards, gradients and optimizer state in the memory of the CPU (on a CPU they are there anyway)
    """

    mode: Literal["full", "hybrid", "none"] = "full"
    group: int | None = None
    blocks: tuple[str, ...] | None = None
    dtype: Literal["master", "compute"] = "compute"
    sync: Literal["auto", "each", "last"] = "auto"
    offload: bool = False

    def __post_init__(self) -> None:
        if (self.mode == "hybrid") != (self.group is not None):
            raise ValueError(f"group goes with mode=hybrid and with no other, got mode={self.mode}, group={self.group}")
        if self.group is not None and self.group < 2:
            raise ValueError(f"group must be at least 2 ranks, got {self.group}; mode=none keeps every rank whole")
        if self.mode == "none" and (self.blocks is not None or self.offload):
            raise ValueError("blocks and offload are for sharded weights: with mode=none leave them out")

    def check(self, ranks: int) -> None:
        """ValueError where `ranks` that have rows or tokens of their own do not make whole groups."""
        if self.group is not None and ranks % self.group:
            raise ValueError(
                f"sharding.group={self.group} does not divide the {ranks} ranks that share weights: choose one of "
                f"{[size for size in range(2, ranks + 1) if ranks % size == 0]}, or another mode"
            )

    def loading(self, world: World, device: torch.device) -> torch.device:
        """Where a model is loaded that then goes to `device`: what is sharded may not fit there while it is whole."""
        in_parts = world.mesh is not None and self.mode != "none" and world.rank_info.dp == world.rank_info.world_size
        return torch.device("cpu") if in_parts else device

    def spread(
        self, bundle: Bundle, world: World, blocks: tuple[str, ...], *, master: torch.dtype, device: torch.device
    ) -> Spread:
        """Spread the weights of `bundle`, before an optimizer sees them.

        blocks: class names that the family knows; master: what trained masters are gathered in, unless in themselves;
        device: where forwards run
        """
        if world.mesh is None:
            return Whole()
        if self.mode == "none":
            return Replicated(world, _ranks(world))
        spread = _shard(bundle, self, world, blocks, None if self.dtype == "master" else master)
        bundle.works_on = device
        for module in bundle.frozen.values():
            module.to(device)
        return spread


class Spread(ABC):
    """even: whether the ranks must do the same forwards in the same order while they train."""

    even: bool = False

    def gathered(self) -> AbstractContextManager[None]:
        """Whole weights on every rank for a `with` block, in which ranks need not go together; all must enter it."""
        return nullcontext()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; `last` of its optimizer step."""
        return nullcontext()

    def settle(self) -> None:  # noqa: B027 - only shards are ever gathered
        """Nothing of earlier weights stays gathered: before other values take their place."""

    @abstractmethod
    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Gradients of the whole step in `parameters`: after the last backward, before they are measured."""


class Whole(Spread):
    """One rank."""

    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Replicated(Spread):
    """A copy on every rank of `ranks`. A parameter without a gradient on all ranks has none afterwards."""

    world: World
    ranks: torch.distributed.DeviceMesh

    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        used = self.world.total([float(parameter.grad is not None) for parameter in parameters.values()])
        some = [parameter for parameter, count in zip(parameters.values(), used, strict=True) if count]
        for parameter in some:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        add_up([parameter.grad for parameter in some if parameter.grad is not None], self.ranks.get_group())


@dataclasses.dataclass(frozen=True)
class Sharded(Spread):
    """A part of each weight on every rank.

    modules:   of FSDP, the root first
    each_sync: sum gradients at each micro-batch, not at the last one of a step alone
    touched:   whether this rank had a gradient of a parameter in this step, by name, for those that no block holds
    """

    bundle: Bundle
    world: World
    modules: Sequence[Any]
    each_sync: bool
    touched: dict[str, bool] = dataclasses.field(default_factory=dict)
    even: bool = True

    def __post_init__(self) -> None:
        self.bundle.agreed = self._agreed
        with torch.no_grad():
            # FSDP takes the first forward for that of its root, and a rollout begins with a block's.
            self.bundle.run(self._watched)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for module in self.modules:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            for module in self.modules:
                module.unshard()
            self.bundle.agreed = list
            yield
        finally:
            self.bundle.agreed = self._agreed
            for module in self.modules:
                module.set_reshard_after_forward(True, recurse=False)
            self.settle()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.modules[0].set_requires_gradient_sync(last or self.each_sync)
        yield

    def settle(self) -> None:
        for module in self.modules:
            module.reshard()

    def add_up(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        # FSDP has, in the last backward; but a micro-batch of an expert that is not trained has none.
        if not self.each_sync and all(parameter.grad is None for parameter in parameters.values()):
            self.bundle.run(lambda: torch.zeros((), requires_grad=True).clone()).backward()
        # What no rank used has zeros, with which AdamW would go on from earlier steps.
        touched = self.world.highest([float(touched) for touched in self.touched.values()])
        for name, anywhere in zip(self.touched, touched, strict=True):
            if not anywhere and any(touched):
                parameters[name].grad = None
            self.touched[name] = False

    def _watched(self) -> tuple[()]:
        """Inside of the root, where the parameters outside of blocks are the gathered ones, to which gradients come."""
        inside = {parameter for module in self.modules[1:] for parameter in module.parameters()}
        for name, parameter in self.bundle.trainable.items():
            if parameter not in inside:
                self.touched[name] = False
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.touched.update({name: True}))
        return ()

    def _agreed(self, counts: Sequence[int]) -> list[int]:
        return [round(count) for count in self.world.highest(counts)]


def _shard(
    bundle: Bundle, sharding: Sharding, world: World, names: tuple[str, ...], master: torch.dtype | None
) -> Sharded:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from unirl.train.backend.root_modules import Root

    precision = MixedPrecisionPolicy(param_dtype=master, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = _mesh(world, sharding)
    offload = CPUOffloadPolicy() if sharding.offload and mesh.device_type != "cpu" else OffloadPolicy()
    bundle.root = Root(bundle.transformer, bundle.critic)
    for module in [*_blocks(bundle.transformer, sharding.blocks, names), bundle.root]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload)
    modules = [module for module in bundle.root.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The tower of a vision-language model lives in the root: a rank without pictures adds zeros for it.
    modules[0].set_reduce_scatter_unused_params(True, recurse=False)
    each = sharding.sync == "each" or (sharding.sync == "auto" and _all_trained(bundle))
    return Sharded(bundle, world, modules, each_sync=each)


def _all_trained(bundle: Bundle) -> bool:
    """Whether the trained module trains whole, not through adapters."""
    return all(parameter.requires_grad for parameter in bundle.trained.parameters())


def _mesh(world: World, sharding: Sharding) -> torch.distributed.DeviceMesh:
    """The ranks of `_ranks`: in one dimension, or in two with copies along the first."""
    ranks = _ranks(world)
    if sharding.group is None:
        return ranks
    copies = ranks.size() // sharding.group
    return ranks._unflatten(0, (copies, sharding.group), ("copies", "shard"))  # noqa: SLF001 - its only name so far


def _ranks(world: World) -> torch.distributed.DeviceMesh:
    """Those that hold the same weights, with rows or tokens of their own: gradients are summed over them."""
    assert world.mesh is not None
    if world.rank_info.sp == 1:
        return world.mesh["dp"]
    return world.mesh["dp", "sp"]._flatten()  # noqa: SLF001 - its only name so far


def _blocks(model: torch.nn.Module, asked: tuple[str, ...] | None, known: tuple[str, ...]) -> list[torch.nn.Module]:
    """Every module of a class that was asked for, or that the family knows, the inner ones first."""
    classes = {type(module).__name__ for module in model.modules()}
    unmatched = [name for name in asked or () if name not in classes]
    names = classes.intersection(known if asked is None else asked)
    if unmatched or not names:
        there = sorted(name for name in classes if "Block" in name or "Layer" in name) or sorted(classes)
        raise ValueError(
            f"train.backend.sharding.blocks: no module of class {unmatched or list(known)}; name some of {there}"
        )
    return [module for module in model.modules() if type(module).__name__ in names][::-1]
