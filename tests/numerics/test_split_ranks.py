"""One run with the model on one rank, and with the model over several: the same weights, gradients and figures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.test_ranks import Run, same, trained
from tests.ranks import RankPool
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.ppo import PPO
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.tiny_language import TinyLM
from unirl.train.backend.sharding import Sharding
from unirl.train.lora import LoRA
from unirl.train.stack.planner import TokenGeometry

LM = TinyLM(layers=1, width=32, heads=4, characters="0123456789ab", context=32)
BUDGET = TokenGeometry(num_updates_per_batch=3, token_budget=14)
TEXTS = {
    "GRPO, LoRA": Run("text", GRPO(kl_coef=0.1), BUDGET, {"lora": LoRA(rank=2, alpha=4)}, LM),
    "GRPO, all weights": Run("text", GRPO(kl_coef=0.1), BUDGET, {"gradient_checkpointing": True}, LM),
    "PPO, all weights": Run("text", PPO(), TokenGeometry(micro_batch_size=2), {"critic": True}, LM),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: trained(RankInfo(0, 1), run, Sharding()) for name, run in TEXTS.items()}


@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize("name", TEXTS)
def test_two_tensor_parallel_ranks(name: str, mode: Any, alone: dict[str, Any], ranks: RankPool) -> None:
    same(ranks(2, trained, TEXTS[name], Sharding(mode=mode), tp=2), alone[name])
