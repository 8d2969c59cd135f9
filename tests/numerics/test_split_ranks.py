"""One run with a model on one rank, and with it split over several: the same weights, gradients and figures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.byte_language import write_checkpoint
from tests.driven import driven, other_rank
from tests.numerics.test_ranks import Run, same, trained
from tests.ranks import RankPool
from tests.tiny_policy import SAMPLING, context
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.flow_sft import FlowSFT
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.ppo import PPO
from unirl.data.records import Records, RecordSampler
from unirl.distributed.group.dispatch import Call, Dispatch, plan
from unirl.distributed.group.rank_info import RankInfo
from unirl.distributed.group.world import World
from unirl.models.base import Bundle
from unirl.models.diffusion.flux1 import FLUX1
from unirl.models.diffusion.qwen_image import QwenImage
from unirl.models.language.attention import PackedLayout
from unirl.models.language.causal_lm import CausalLM
from unirl.models.language.vision_language import VisionLanguage, _trial
from unirl.models.random_weights.flux1 import write
from unirl.models.random_weights.qwen_image import write as write_qwen_image
from unirl.models.tiny_language import TinyLM
from unirl.rollout.supervised import SupervisedEncoder
from unirl.train.backend.sharding import Sharding
from unirl.train.backend.state import tensors_of
from unirl.train.dtensor import local, whole
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.stack.planner import DiffusionGeometry, TokenGeometry

# Thirteen tokens: no number of ranks here divides the vocabulary.
LM = TinyLM(layers=1, width=32, heads=4, characters="0123456789ab", context=32)
BUDGET = TokenGeometry(num_updates_per_batch=3, token_budget=14)
TEXTS = {
    "GRPO, LoRA": Run("text", GRPO(kl_coef=0.1), BUDGET, {"lora": LoRA(rank=2, alpha=4)}, LM),
    "GRPO, all weights": Run("text", GRPO(kl_coef=0.1), BUDGET, {"gradient_checkpointing": True}, LM),
    "PPO, all weights": Run("text", PPO(), TokenGeometry(micro_batch_size=2), {"critic": True}, LM),
}
RECORDS = Records(torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), ["one", "two"] * 4)
PICTURES = {
    "FlowGRPO, all weights": Run(
        "picture",
        FlowGRPO(kl_coef=0.1),
        DiffusionGeometry(num_updates_per_batch=3, micro_batch_size=2),
        {"gradient_checkpointing": True},
    ),
    "NFT, LoRA, EMA": Run(
        "picture",
        DiffusionNFT(),
        DiffusionGeometry(micro_batch_size=2),
        {"lora": LoRA(rank=2, alpha=4), "ema": EMA(decay=0.5, warmup="constant", unit="rollout")},
    ),
}

MODES = ["full", pytest.param("none", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("flux")
    family = FLUX1(checkpoint=str(write(folder / "model", guidance=False)))
    sampling = dataclasses.replace(SAMPLING, height=32, width=32)
    return TEXTS | {name: dataclasses.replace(run, family=family, sampling=sampling) for name, run in PICTURES.items()}


@pytest.fixture(scope="module")
def alone(runs: dict[str, Run]) -> Callable[[str], Any]:
    return functools.cache(lambda name: trained(RankInfo(0, 1), runs[name], Sharding()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEXTS)
def test_tensor_parallel_ranks_train_what_one_does(
    name: str, mode: Any, alone: Callable[[str], Any], ranks: RankPool
) -> None:
    same(ranks(2, trained, TEXTS[name], Sharding(mode=mode), tp=2), alone(name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [pytest.param("FlowGRPO, all weights", marks=pytest.mark.slow), "NFT, LoRA, EMA"])
def test_sequence_parallel_ranks_train_what_one_does(
    name: str, mode: Any, runs: dict[str, Run], alone: Callable[[str], Any], ranks: RankPool
) -> None:
    same(ranks(2, trained, runs[name], Sharding(mode=mode), sp=2), alone(name))


def exported(info: RankInfo, run: Run, sharding: Sharding, folder: Path) -> None:
    run.backend(info, sharding).export(folder, weights="live")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["GRPO, LoRA", "GRPO, all weights"])
def test_a_split_model_is_exported_whole(name: str, mode: Any, tmp_path: Path, ranks: RankPool) -> None:
    exported(RankInfo(0, 1), TEXTS[name], Sharding(), tmp_path / "one")
    ranks(2, exported, TEXTS[name], Sharding(mode=mode), tmp_path / "two", tp=2)
    files = [file.name for file in (tmp_path / "one").glob("*.safetensors")]
    assert files
    for file in files:
        one, two = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def resumed(info: RankInfo, run: Run, sharding: Sharding, folder: Path) -> dict[str, torch.Tensor]:
    backend = run.backend(info, sharding)
    backend.load(folder)
    return {name: whole(value) for name, value in tensors_of(backend.state()).items()}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(mode="none")])
@pytest.mark.parametrize("name", ["GRPO, LoRA", "GRPO, all weights"])
def test_a_checkpoint_of_a_split_model_goes_on_however_it_is_split(
    name: str, sharding: Sharding, tmp_path: Path, ranks: RankPool
) -> None:
    weights, _ = ranks(4, trained, TEXTS[name], sharding, tmp_path, dp=2, tp=2)[0]
    one = resumed(RankInfo(0, 1), TEXTS[name], Sharding(), tmp_path)
    for key, value in weights.items():
        assert torch.equal(one[f"parameters.{key}"], value)
    assert any(key.startswith("optimizer.") for key in one)
    for count, axes in ((2, {"tp": 2}), (2, {"dp": 2}), (4, {"dp": 2, "tp": 2})):
        for other in ranks(count, resumed, TEXTS[name], sharding, tmp_path, **axes):
            assert other.keys() == one.keys()
            assert all(torch.equal(other[key], one[key]) for key in one)


Draws = tuple[torch.Tensor, ...]


def draws(info: RankInfo, run: Run) -> list[Draws]:
    """Noise levels, noise and losses of the forward process in two steps, and what the process draws by itself."""
    backend, algorithm = run.backend(info, Sharding()), FlowSFT(seed=1)
    encoder = SupervisedEncoder.on_rank(info, backend, run.sampling)
    ranks = [other_rank(info, rank) for rank in range(info.world_size)]
    found = []
    for step in range(2):
        part = driven(encoder, "encode", RecordSampler(RECORDS, 8, seed=0).draw(step))
        own = plan(Dispatch.DP_SCATTER, Call((part,), {}), ranks)[info.rank].args[0]
        losses = algorithm.loss(context(backend), own, slice(0, 1), None).losses.detach()
        found.append((*algorithm._draws(own.ids, own.segment.latents), losses, torch.rand(4)))
    return found


@pytest.mark.slow
def test_the_draws_of_training_differ_between_data_parallel_ranks_and_not_within_one(
    runs: dict[str, Run], ranks: RankPool
) -> None:
    first, beside, other, last = ranks(4, draws, runs["NFT, LoRA, EMA"], dp=2, sp=2)
    for mine, same_rows, other_rows, same_other_rows in zip(first, beside, other, last, strict=True):
        assert all(map(torch.equal, mine, same_rows))
        assert all(map(torch.equal, other_rows, same_other_rows))
        assert not any(map(torch.equal, mine, other_rows))
    for steps in (first, other):
        assert not any(map(torch.equal, *steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(mode="hybrid", group=2), Sharding(mode="none"), Sharding(sync="each")]
)
@pytest.mark.parametrize("name", [*TEXTS, *PICTURES])
def test_data_parallel_copies_of_a_split_model_train_what_one_rank_does(
    name: str, sharding: Sharding, runs: dict[str, Run], alone: Callable[[str], Any], ranks: RankPool
) -> None:
    axes = {"tp": 2} if name in TEXTS else {"sp": 2}
    same(ranks(4, trained, runs[name], sharding, dp=2, **axes), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 2}, {"tp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_share_the_experts_of_a_mixture(axes: dict[str, int], tmp_path: Path, ranks: RankPool) -> None:
    """Every weight is trained; a router that saw only the experts of its rank would train differently."""
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    checkpoint = write_checkpoint(
        tmp_path / "model", template=None, model="Qwen3Moe", num_hidden_layers=1, initializer_range=0.1, **sizes
    )
    run = Run("text", GRPO(kl_coef=0.1), BUDGET, {}, CausalLM(str(checkpoint), template="plain"))
    one = trained(RankInfo(0, 1), run, Sharding())
    count = 2 * axes.get("dp", 1)
    same(ranks(count, trained, run, Sharding(), **axes), one)


Forward = tuple[torch.Tensor, dict[str, torch.Tensor]]


def forward(family: VisionLanguage, bundle: Bundle) -> Forward:
    """Logits of a prompt with a picture and of one without, and the gradient of a weighted mean of them."""
    model: Any = bundle.transformer
    model.zero_grad(set_to_none=True)
    prompts = _trial(model.config, family.vocabulary(bundle))
    positions, _ = family.positions(bundle, prompts)
    layout = PackedLayout.of_prompts(prompts.lengths)
    logits = family.logits(
        bundle, family.read_tokens(bundle, prompts.tokens, positions, layout, pictures=prompts.pictures)
    )
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).mean().backward()
    return logits.detach().clone(), {name: value.grad.clone() for name, value in model.named_parameters()}


def whole_and_split(info: RankInfo, checkpoint: str) -> tuple[Forward, Forward, int]:
    """In float64, and the rows of the first projection that the rank holds."""
    family = VisionLanguage(checkpoint)
    bundle = family.load(torch.device("cpu"), torch.float32)
    model: Any = bundle.transformer
    for module in (model, *bundle.frozen.values()):
        module.double()
    model.requires_grad_(True)
    one, world = forward(family, bundle), World.of(info, "cpu")
    assert world.mesh is not None
    partial = family.split(bundle, "tp", world.mesh["tp"])
    logits, gradients = forward(family, bundle)
    for name in partial:
        torch.distributed.all_reduce(local(gradients[name]))
    rows = local(model.base_model.language_model.layers[0].self_attn.q_proj.weight).shape[0]
    return one, (logits, {name: whole(value) for name, value in gradients.items()}), rows


def test_a_split_vision_language_model_differs_by_rounding_alone(ranks: RankPool) -> None:
    """In float64 nothing is left of what differs by 1e-5 after steps of AdamW in float32."""
    for (logits, gradients), (own, others), rows in ranks(2, whole_and_split, "random:qwen2_5_vl", tp=2):
        assert 2 * rows == gradients["model.language_model.layers.0.self_attn.q_proj.weight"].shape[0]
        torch.testing.assert_close(own, logits, rtol=0, atol=1e-12)
        assert others.keys() == gradients.keys()
        largest = max(float(value.abs().max()) for value in gradients.values())
        for key, value in gradients.items():
            torch.testing.assert_close(others[key] / largest, value / largest, rtol=0, atol=1e-12)


def trained_on_cpus(info: RankInfo, run: Run, sharding: Sharding) -> Any:
    """diffusers keeps its tensor parallel plans to accelerators, and they need none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",))
        patch.setattr(type(run.family), "tp_devices", ("cpu",))
        return trained(info, run, sharding)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", PICTURES)
def test_tensor_parallel_ranks_of_diffusers_train_what_one_does(
    name: str, axes: dict[str, int], tmp_path: Path, ranks: RankPool
) -> None:
    family = QwenImage(checkpoint=str(write_qwen_image(tmp_path / "model")))
    sampling = dataclasses.replace(SAMPLING, height=32, width=32)
    run = dataclasses.replace(PICTURES[name], family=family, sampling=sampling)
    one = trained(RankInfo(0, 1), run, Sharding())
    same(ranks(2 * axes.get("dp", 1), trained_on_cpus, run, Sharding(), **axes), one)
