"""Axes over which a model cannot be split are refused by name, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_policy import SMALL
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.base import Family
from unirl.models.diffusion.flux1 import FLUX1
from unirl.models.diffusion.ltx2 import LTX2
from unirl.models.diffusion.qwen_image import QwenImage
from unirl.models.diffusion.wan import Wan21
from unirl.models.language.causal_lm import CausalLM
from unirl.models.split import _refuse_uneven
from unirl.models.tiny_language import TinyLM
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.parallel import refuse_axes

LM, FLUX, QWEN = TinyLM(heads=4), FLUX1("random:flux1_dev"), QwenImage("random:qwen_image")


@pytest.mark.parametrize(
    ("family", "axes", "reason"),
    [
        (LM, {"sp": 2}, "TinyLM cannot be split with sp=2: transformers ships no such plan for it. Into 2 .* tp;"),
        (LM, {"pp": 2}, "TinyLM cannot be split with pp=2: .* set placement.pp=1"),
        (LM, {"ep": 2}, "TinyLM cannot be split with ep=2: transformers ships no such plan"),
        (LM, {"tp": 4}, r"tp=4: 4 does not divide its heads, \{'num_key_value_heads': 2\}. Into 4 .* with no axis"),
        (SMALL, {"sp": 2}, "TinySD3 cannot be split with sp=2: diffusers ships no such plan for it"),
        (SMALL, {"tp": 2}, "TinySD3 cannot be split with tp=2: diffusers ships no such plan for it"),
        (FLUX, {"tp": 2}, "FLUX1 cannot be split with tp=2: diffusers ships no such plan for it. Into 2 .* sp;"),
        (QWEN, {"tp": 2}, "diffusers runs its plan for it on cuda, neuron, tpu, xpu, not on cpu. Into 2 .* sp;"),
        (FLUX, {"pp": 2}, "FLUX1 cannot be split with pp=2"),
        (FLUX, {"ep": 2}, "FLUX1 cannot be split with ep=2"),
        (LTX2("random:ltx2"), {"sp": 2}, "LTX2 cannot be split with sp=2"),
    ],
)
def test_an_axis_without_a_plan_is_refused(family: Family, axes: dict[str, int], reason: str) -> None:
    count = 2 if 2 in axes.values() else 4
    with pytest.raises(ValueError, match=reason):
        refuse_axes(family, RankInfo(0, count, **axes), "cpu")


def test_one_axis_beside_data_parallel() -> None:
    with pytest.raises(
        ValueError, match=r"QwenImage is split over one axis beside data parallel, got \{'tp': 2, 'sp': 2\}"
    ):
        refuse_axes(QWEN, RankInfo(0, 4, tp=2, sp=2), "cuda")


@pytest.mark.parametrize("info", [RankInfo(0, 1), RankInfo(3, 4, dp=4), RankInfo(0, 4, dp=2, sp=2)])
def test_what_diffusers_has_a_plan_for_goes(info: RankInfo) -> None:
    refuse_axes(FLUX, info, "cpu")
    refuse_axes(Wan21("random:wan21"), info, "cpu")


def test_the_config_of_a_checkpoint_decides_before_its_weights_are_read(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = CausalLM(str(tmp_path), template="plain")
    for axes in ({"ep": 2}, {"tp": 2}):
        refuse_axes(family, RankInfo(0, 2, **axes), "cpu")
    with pytest.raises(ValueError, match=r"CausalLM cannot be split with sp=2: .* with tp, ep; set placement.sp=1"):
        FSDPBackend.on_rank(
            RankInfo(0, 2, sp=2),
            family,
            ARBackendConfig(),
            device=torch.device("cpu"),
            seed=0,
            total_steps=1,
            with_reference=False,
        )


class Reader(torch.nn.Module):
    def forward(self, tokens: torch.Tensor, other: int = 0) -> torch.Tensor:
        return tokens


def test_tokens_that_do_not_divide_are_named() -> None:
    from diffusers.models._modeling_parallel import ContextParallelInput

    reader = Reader()
    _refuse_uneven([reader], {"tokens": ContextParallelInput(split_dim=1, expected_dims=3)}, size=2)
    assert reader(torch.zeros(3, 4, 5)).shape == (3, 4, 5)
    with pytest.raises(ValueError, match="7 tokens of tokens do not divide into sp=2 parts"):
        reader(torch.zeros(2, 7, 5), other=1)
