"""FSDPBackend: the policy's weights and everything that changes them.

Structural injection (LoRA, EMA shadow, reference), sharding, optimizer, learning rate and gradient clipping of one
trainable module. What a step decides (its norm, whether it is skipped) is the same on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, Literal

import torch

from unirl.distributed.group.axes import Axes
from unirl.distributed.group.dispatch import Dispatch
from unirl.distributed.group.remote import Remote, remote
from unirl.distributed.group.world import World
from unirl.train.backend.config import BackendConfig, FamilyT, StageT
from unirl.train.backend.gradients import clipped
from unirl.train.backend.parallel import Split, refuse_checkpoint, refuse_ranks
from unirl.train.backend.state import COUNTERS, moments_like, nested, refuse_misfit, tensors_of
from unirl.train.dtensor import all_whole, by_mesh
from unirl.train.ema import Shadow
from unirl.train.lora import inject, switched_off
from unirl.train.rng import rng_state, seed_rngs, set_rng_state
from unirl.train.shards import ShardReader, ShardWriter
from unirl.train.stored_file import StoredFile
from unirl.types.metric import Metrics, mean, total
from unirl.types.seed import derive_seed

logger = logging.getLogger(__name__)


class FSDPBackend(Remote, Generic[FamilyT, StageT]):
    """Loads a family and owns its trainable weights.

    total_steps:    optimizer steps of the whole run, for the learning-rate schedule
    with_reference: keep the initial weights, as LoRA off or as a frozen copy
    """

    def __init__(
        self,
        family: FamilyT,
        config: BackendConfig[FamilyT, StageT],
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        with_reference: bool,
    ) -> None:
        axes = Axes.of(self.rank_info)
        refuse_ranks(family, config.sharding, axes, devices=self.rank_info.world_size, device_type=device.type)
        refuse_checkpoint(family, axes)
        self._seed, self._writer = seed, ShardWriter(self.rank_info)
        # Ranks with rows of their own have streams of their own; ranks that share rows share the stream.
        seed_rngs(seed if self.rank_info.dp_rank == 0 else derive_seed(seed, "rank", self.rank_info.dp_rank))
        self._config, self._total_steps = config, total_steps
        self.world = World.of(self.rank_info, device.type)
        dtype = _compute_dtype(config.compute_dtype, device)
        # Masters are float32: a transformer that is trained whole is never rounded on its way in.
        master_dtype = torch.float32 if config.lora is None else dtype
        bundle = family.load(config.sharding.loading(self.world, device), master_dtype, frozen_dtype=dtype)
        self._module = bundle.trained
        if config.lora is None:
            self._module.requires_grad_(True)
        else:
            inject(self._module, config.lora, family.lora_targets, seed)
        if config.gradient_checkpointing:
            family.recompute_blocks(bundle)
        self.stage: StageT = config.stage(family, bundle, dtype)
        self.split = Split.of(family, bundle, self.world)
        self.spread = config.sharding.spread(bundle, self.world, family.blocks(bundle), master=dtype, device=device)
        self._parameters = bundle.trainable
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(list(self._parameters.values()))],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._ema = Shadow(self._parameters) if config.ema is not None else None
        self._reference = Shadow(self._parameters) if with_reference and config.lora is None else None
        self._steps = self._steps_of_version = self._ema_updates = self._skipped_in_row = 0
        self.version = 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.stage.bundle.device

    def reference(self) -> AbstractContextManager[None]:
        """The initial weights, for the duration of a `with` block."""
        if self._config.lora is not None:
            return switched_off(self._module)
        assert self._reference is not None, "the backend was made without a reference"
        return self._applied(self._reference)

    def ema(self) -> AbstractContextManager[None]:
        """The EMA weights, for the duration of a `with` block."""
        assert self._ema is not None, "the backend was made without an EMA"
        return self._applied(self._ema)

    def gathered(self) -> AbstractContextManager[None]:
        """Whole weights on this rank for the duration of a `with` block, which every rank enters."""
        return self.spread.gathered()

    def step(self) -> Metrics:
        """One optimizer step from the accumulated gradient, or none where the gradient is not finite."""
        self.spread.add_up(self._parameters)
        self.split.add_up(self._parameters)
        norm = clipped(list(self._parameters.values()), self._config.max_grad_norm)
        lr = self._config.optimizer.lr_at(self._steps, self._total_steps)
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._steps += 1
            self._skipped_in_row = 0
            self._update_ema("optimizer_step")
        else:
            self._skipped_in_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        if self._skipped_in_row > self._config.max_skipped_steps:
            raise FloatingPointError(
                f"the gradient was not finite {self._skipped_in_row} times in a row (max_skipped_steps="
                f"{self._config.max_skipped_steps}); lower the learning rate or look at the first bad sample"
            )
        finite = math.isfinite(norm)
        return {
            "train/grad_norm": mean(norm, 1.0 if finite else 0.0),
            "train/lr": mean(lr, 1.0 if finite else 0.0),
            "train/skipped": total(0.0 if finite else 1.0),
        }

    def finish_rollout(self) -> None:
        """All updates on a rollout are done: the weights have a new version, unless no update was taken."""
        if self._steps > self._steps_of_version:
            self._steps_of_version = self._steps
            self._update_ema("rollout")
            self.version += 1

    @remote(Dispatch.RANK_ZERO)
    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs of this backend, as this rank holds it; the tensors are the live ones."""
        return {
            "parameters": {name: p.detach() for name, p in self._parameters.items()},
            # A parameter that never got a gradient has no optimizer state, and gets none by being saved.
            "optimizer": {
                name: dict(self._optimizer.state[parameter])
                for name, parameter in self._parameters.items()
                if parameter in self._optimizer.state
            },
            "ema": None if self._ema is None else dict(self._ema.values),
            **self._own(),
        }

    @remote(Dispatch.BROADCAST)
    def save(self, folder: Path, *, background: bool) -> None:
        """Write the state into the existing `folder`, each rank its own part; `finish_save` ends it.

        background: return when the state is copied to the memory of the host, and write while training goes on
        """
        self._writer.start(folder, tensors_of(self.state()), self._own(), background=background)

    @remote(Dispatch.RANK_ZERO)
    def saving(self) -> bool:
        """Whether a save still writes. All ranks end together."""
        return self._writer.writing()

    @remote(Dispatch.BROADCAST)
    def finish_save(self) -> dict[str, StoredFile]:
        """Wait for the save under way: the files that all ranks have written, by name. Raises what failed on any."""
        return self._writer.finish()

    @remote(Dispatch.BROADCAST)
    def load(self, folder: Path) -> None:
        """Take over what `save` has written, on any number of ranks, bit for bit; a state that does not fit is refused.

        What fails on one rank is raised on all.
        """
        self.spread.settle()
        saved, reader = self._writer.ranks.together(lambda: self._fitting(folder))
        moments = moments_like(saved["optimizer"], self._parameters)
        into = {"parameters": self._parameters, "optimizer": moments, "ema": self._ema and self._ema.values}
        self._writer.ranks.together(lambda: reader.read(tensors_of(into)))
        self._go_on(moments, saved)
        self._go_on_drawing(reader, folder)

    def close(self) -> None:
        """Wait for a save under way."""
        self._writer.close()

    @remote(Dispatch.BROADCAST)
    def export(self, folder: Path, *, weights: Literal["live", "ema"]) -> None:
        """Write what the ecosystem loads: the family's own folder, or a PEFT adapter where LoRA is trained."""
        from unirl.train.export import write_export

        self.spread.settle()
        with self.ema() if weights == "ema" else nullcontext(), all_whole(self.stage.bundle.transformer):
            if self.rank_info.rank == 0:
                write_export(self.stage, self._config.lora, folder)

    @contextmanager
    def _applied(self, shadow: Shadow) -> Iterator[None]:
        self.spread.settle()
        with shadow.applied():
            try:
                yield
            finally:
                self.spread.settle()

    def _own(self) -> dict[str, Any]:
        """What is not in tensors that all ranks share."""
        counters = (self._steps, self._ema_updates, self._skipped_in_row, self.version)
        return {**dict(zip(COUNTERS, counters, strict=True)), "rng": rng_state(), "dp_rank": self.rank_info.dp_rank}

    def _fitting(self, folder: Path) -> tuple[dict[str, Any], ShardReader]:
        """The state in `folder` without its data, and the reader of that."""
        reader = ShardReader(folder)
        saved = nested(reader.outline(), reader.own(0))
        refuse_misfit(saved, self._parameters, ema=self._ema is not None)
        return saved, reader

    def _go_on_drawing(self, reader: ShardReader, folder: Path) -> None:
        """With the stream of this rank, or of one that had its place among the data-parallel ones."""
        rank, dp_rank = self.rank_info.rank, self.rank_info.dp_rank
        saved = sorted(range(reader.world_size), key=lambda other: other != rank)
        stream = next((own["rng"] for other in saved if (own := reader.own(other))["dp_rank"] == dp_rank), None)
        if stream is not None:
            set_rng_state(stream)
        else:
            logger.info("rank %d starts its global random streams: %s is of %d ranks", rank, folder, reader.world_size)
            seed_rngs(derive_seed(self._seed, "joined", dp_rank, self._steps))

    def _go_on(self, moments: dict[str, dict[str, torch.Tensor]], counters: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        for name, entries in moments.items():
            self._optimizer.state[self._parameters[name]] = entries
        self._steps, self._ema_updates, self._skipped_in_row, self.version = (counters[name] for name in COUNTERS)
        self._steps_of_version = self._steps

    def _update_ema(self, unit: Literal["optimizer_step", "rollout"]) -> None:
        ema = self._config.ema
        if self._ema is not None and ema is not None and ema.unit == unit:
            self._ema.update(ema.decay_at(self._ema_updates))
            self._ema_updates += 1


def _compute_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
