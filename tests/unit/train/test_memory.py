"""The arithmetic of memory against the bytes of real backends, on one rank and on two."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from tests.tiny_policy import SMALL
from unirl.distributed.group.rank_info import RankInfo
from unirl.train.backend.config import DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.dtensor import local
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.memory import ModelSize, RankMemory, rank_memory

FIELDS = ("weights", "moments", "average", "reference", "gathered")
ALONE = RankInfo(rank=0, world_size=1)


def counted(info: RankInfo, lora: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of this rank after a step, by field; and how many weights there are in the whole."""
    config = DiffusionBackendConfig(lora=LoRA(rank=2, alpha=4) if lora else None, ema=EMA())
    backend = FSDPBackend.on_rank(
        info, SMALL, config, device=torch.device("cpu"), seed=0, total_steps=1, with_reference=True
    )
    for parameter in backend._parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    backend.step()
    weights = dict(backend.stage.bundle.transformer.named_parameters())
    adapters = sum(weight.numel() for name, weight in weights.items() if "lora_" in name)
    sizes = {"transformer": sum(weight.numel() for weight in weights.values()) - adapters, "adapters": adapters}
    moments = [state[key] for state in backend._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    shadows = {"average": backend._ema, "reference": backend._reference}
    found = {name: nbytes([] if shadow is None else shadow.values.values()) for name, shadow in shadows.items()}
    found |= {"weights": nbytes(weights.values()), "moments": nbytes(moments)}
    with backend.gathered():
        whole = nbytes(backend.stage.bundle.transformer.parameters())
    return found | {"gathered": whole if info.world_size > 1 else 0}, sizes


def nbytes(tensors: Any) -> int:
    return sum(local(tensor.detach()).numel() * tensor.element_size() for tensor in tensors)


def told(sizes: dict[str, int], lora: bool, shards: int) -> dict[str, int]:
    size = ModelSize(**sizes, block=0, outside=0, frozen=0)
    return dataclasses.asdict(rank_memory(size, lora=lora, shards=shards, ema=True, reference=True, compute=4))


@pytest.mark.parametrize("lora", [True, False])
def test_one_rank_holds_what_is_told(lora: bool) -> None:
    found, sizes = counted(ALONE, lora)
    expected = told(sizes, lora, 1)
    assert found == {name: expected[name] for name in FIELDS}


@pytest.mark.parametrize("lora", [True, False])
def test_two_ranks_hold_the_same_together_and_gather_it_for_a_rollout(lora: bool, ranks: RankPool) -> None:
    (first, sizes), (second, _) = ranks(2, counted, lora)
    alone, half = told(sizes, lora, 1), told(sizes, lora, 2)
    assert [first[name] + second[name] for name in FIELDS[:-1]] == [alone[name] for name in FIELDS[:-1]]
    assert first["weights"] == pytest.approx(half["weights"], rel=0.02)
    assert first["gathered"] == second["gathered"] == half["gathered"]


def test_a_model_of_a_thousand_weights_by_hand() -> None:
    """All of them on two ranks: 4 bytes of master, 8 of moments, 4 of gradient, halved; whole, 2 bytes each."""
    size = ModelSize(transformer=1000, adapters=0, block=100, outside=50, frozen=10)
    assert rank_memory(size, lora=False, shards=2) == RankMemory(2000, 2000, 4000, 0, 0, 20, 500, 2000)
    assert rank_memory(size, lora=False, shards=2).training == 2000 + 2000 + 4000 + 20 + 500
    assert rank_memory(size, lora=False, shards=2).rollout == 2000 + 4000 + 20 + 2000
