"""What a policy takes of a rank's memory, by arithmetic: before a machine is rented, not after it ran out.

Activations, the pictures of a rollout and the allocator's own losses come on top.
"""

from __future__ import annotations

import dataclasses

MASTER = 4  # bytes of a float32 master, gradient or average; AdamW keeps two such moments
COMPUTE = 2  # bytes of a bfloat16 weight


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Numbers of weights.

    transformer: of what is trained
    adapters:    of LoRA on it
    block:       of its largest block
    outside:     of the transformer, outside of its blocks
    frozen:      of the other modules: text encoders, autoencoder
    """

    transformer: int
    adapters: int
    block: int
    outside: int
    frozen: int


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    weights, gradients, moments, average, reference: kept, or there while a step is taken
    frozen:   whole on every rank
    at_work:  what a sharded forward or backward gathers on top: two blocks and what is outside of blocks
    gathered: what a rollout gathers on top: all weights in the compute dtype
    """

    weights: int
    gradients: int
    moments: int
    average: int
    reference: int
    frozen: int
    at_work: int
    gathered: int

    @property
    def training(self) -> int:
        """All that there is at once in an optimizer step."""
        return self._kept + self.gradients + self.at_work

    @property
    def rollout(self) -> int:
        """All that there is at once in a rollout."""
        return self._kept + self.gathered

    @property
    def _kept(self) -> int:
        return self.weights + self.moments + self.average + self.reference + self.frozen


def rank_memory(
    size: ModelSize,
    *,
    lora: bool,
    shards: int,
    ema: bool = False,
    reference: bool = False,
    compute: int = COMPUTE,
) -> RankMemory:
    """lora: train adapters on weights in the compute dtype; else all weights, with float32 masters
    shards:  ranks that share one copy: all of them (full), those of a group (hybrid), 1 (none)
    reference: a frozen copy of the masters; with LoRA it is the model without its adapters
    compute: bytes of a weight in the forward
    """
    trained = size.adapters if lora else size.transformer
    base = size.transformer * compute if lora else 0
    whole = size.transformer + (size.adapters if lora else 0)
    # With LoRA gradients are summed at the last micro-batch of a step, and whole until then (sharding.sync=auto).
    gradients = MASTER * trained if lora else MASTER * trained // shards
    return RankMemory(
        weights=(base + MASTER * trained) // shards,
        gradients=gradients,
        moments=2 * MASTER * trained // shards,
        average=MASTER * trained // shards if ema else 0,
        reference=MASTER * trained // shards if reference and not lora else 0,
        frozen=size.frozen * compute,
        at_work=compute * (size.outside + 2 * size.block) if shards > 1 else 0,
        gathered=compute * whole if shards > 1 else 0,
    )
