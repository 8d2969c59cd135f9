"""Axes over which a model cannot be split are refused by name, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_policy import SMALL
from unirl.distributed.group.axes import Axes
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.base import DiffusionFamily, Family
from unirl.models.diffusion.flux1 import FLUX1
from unirl.models.diffusion.ltx2 import LTX2
from unirl.models.diffusion.qwen_image import QwenImage
from unirl.models.diffusion.wan import Wan21
from unirl.models.language.causal_lm import CausalLM
from unirl.models.language.vision_language import VisionLanguage
from unirl.models.split import _refuse_uneven
from unirl.models.tiny_language import TinyLM
from unirl.train.backend.config import ARBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.parallel import refuse_checkpoint, refuse_ranks
from unirl.train.backend.sharding import Sharding

LM, FLUX, QWEN = TinyLM(heads=4), FLUX1("random:flux1_dev"), QwenImage("random:qwen_image")


def refuse(family: Family, axes: Axes, device_type: str | None = None, devices: int | None = None) -> None:
    refuse_ranks(family, Sharding(), axes, devices=devices, device_type=device_type)


@pytest.mark.parametrize(
    ("family", "axes", "reason"),
    [
        (LM, {"sp": 2}, "TinyLM cannot be split with sp=2: its library ships no such plan. It can be .* with tp; set"),
        (LM, {"pp": 2}, "TinyLM cannot be split with pp=2: .* set placement.pp=1"),
        (LM, {"ep": 2}, "TinyLM cannot be split with ep=2: its library ships no such plan"),
        (SMALL, {"sp": 2}, "TinySD3 cannot be split with sp=2: its library ships no such plan. .* with no axis"),
        (SMALL, {"tp": 2}, "TinySD3 cannot be split with tp=2"),
        (FLUX, {"tp": 2}, "FLUX1 cannot be split with tp=2: its library ships no such plan. .* with sp; set"),
        (FLUX, {"pp": 2}, "FLUX1 cannot be split with pp=2"),
        (FLUX, {"ep": 2}, "FLUX1 cannot be split with ep=2"),
        (LTX2("random:ltx2"), {"sp": 2}, "LTX2 cannot be split with sp=2"),
        (QWEN, {"tp": 2, "sp": 2}, r"one axis beside data parallel, got \{'tp': 2, 'sp': 2\}"),
    ],
)
def test_an_axis_without_a_plan_is_refused(family: Family, axes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        refuse(family, Axes(**axes))


def test_the_plans_of_diffusers_for_tensors_need_a_gpu() -> None:
    from diffusers.hooks.tensor_parallel import _SUPPORTED_TP_DEVICES

    assert set(DiffusionFamily.tp_devices) == set(_SUPPORTED_TP_DEVICES) & {"cpu", "cuda"}
    with pytest.raises(ValueError, match=r"QwenImage .* tp=2: its library ships no such plan for cpu. .* with sp; set"):
        refuse(QWEN, Axes(tp=2), "cpu")
    refuse(QWEN, Axes(tp=2), "cuda")
    refuse(QWEN, Axes(tp=2))
    refuse(LM, Axes(tp=2), "cpu")


@pytest.mark.parametrize("axes", [Axes(), Axes(sp=2)], ids=str)
def test_what_diffusers_has_a_plan_for_goes(axes: Axes) -> None:
    refuse(FLUX, axes, "cpu", 4)
    refuse(Wan21("random:wan21"), axes, "cpu", 4)


def test_groups_of_hybrid_sharding_divide_the_ranks_with_rows_or_tokens_of_their_own() -> None:
    hybrid = Sharding(mode="hybrid", group=3)
    refuse_ranks(FLUX, hybrid, Axes(sp=2), devices=6, device_type=None)
    refuse_ranks(FLUX, hybrid, Axes(), devices=None, device_type=None)
    with pytest.raises(ValueError, match=r"group=3 does not divide the 4 ranks .* choose one of \[2, 4\]"):
        refuse_ranks(FLUX, hybrid, Axes(sp=2), devices=4, device_type=None)
    with pytest.raises(ValueError, match=r"group=3 does not divide the 2 ranks"):
        refuse_ranks(LM, hybrid, Axes(tp=3), devices=6, device_type=None)


def test_the_heads_of_a_model_must_divide() -> None:
    with pytest.raises(ValueError, match=r"tp=4: 4 does not divide its heads, \{'num_key_value_heads': 2\}; choose"):
        refuse_checkpoint(LM, Axes(tp=4))
    refuse_checkpoint(LM, Axes(tp=2))


def test_a_plan_that_leaves_the_layers_whole_is_none() -> None:
    with pytest.raises(ValueError, match=r"the plan that .* leaves its layers whole, \{'embed_tokens'"):
        refuse_checkpoint(VisionLanguage("random:qwen3_vl"), Axes(tp=2))
    refuse_checkpoint(VisionLanguage("random:qwen2_5_vl"), Axes(tp=2))


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_the_config_of_a_checkpoint_decides_before_its_weights_are_read(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, "num_key_value_heads": 4}))
    family = CausalLM(str(tmp_path), template="plain")
    refuse(family, Axes(ep=2))
    refuse_checkpoint(family, Axes(tp=2))
    if model == "qwen3_moe":
        return refuse_checkpoint(family, Axes(ep=2))
    with pytest.raises(ValueError, match=r"CausalLM cannot be split with ep=2: transformers ships no such plan for it"):
        FSDPBackend.on_rank(
            RankInfo(0, 2, ep=2),
            family,
            ARBackendConfig(),
            device=torch.device("cpu"),
            seed=0,
            total_steps=1,
            with_reference=False,
        )
    return None


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
