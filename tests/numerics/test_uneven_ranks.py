"""Families that do a forward for each group of rows: ranks whose rows differ train what one does, and none waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driven import driven
from tests.families.case import Case, Given
from tests.families.cases import cosmos3, flux2, flux3, qwen_image_2_1, qwen_image_edit, wan
from tests.numerics.test_ranks import Run, same, trained
from tests.ranks import RankPool, rank_pool
from unirl.algorithms.base import Progress
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.flow_grpo import FlowGRPO
from unirl.algorithms.flow_sft import FlowSFT
from unirl.data.prompts import PromptRow
from unirl.data.records import Records, RecordSampler
from unirl.distributed.group.rank_info import RankInfo
from unirl.rollout.supervised import SupervisedEncoder
from unirl.train.backend.sharding import Sharding
from unirl.train.dtensor import whole
from unirl.train.ema import EMA
from unirl.train.lora import LoRA
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry
from unirl.types.metric import values

SHORT, LONG = flux3.TEXTS  # one window of tokens and two
ADAPTER: dict[str, Any] = {"lora": LoRA(rank=2, alpha=4)}
POINT = DiffusionGeometry(micro_batch_size=1, replay_batch=1)
FULL = Sharding()


def prompts(*texts: str, pictures: list[list[torch.Tensor]] | None = None) -> tuple[PromptRow, ...]:
    rows = [[]] * len(texts) if pictures is None else pictures
    return tuple(PromptRow(text, pictures=tuple(map(Given, own))) for text, own in zip(texts, rows, strict=True))


@dataclasses.dataclass(frozen=True)
class Uneven:
    """A run with the tiny checkpoint of a case."""

    case: Case
    run: Run

    def on(self, folder: Path) -> Run:
        return dataclasses.replace(self.run, family=self.case.family(folder))


def grpo(case: Case, *rows: PromptRow, **settings: Any) -> Uneven:
    """Micro-batches of two rows and two steps."""
    geometry = DiffusionGeometry(num_updates_per_batch=3, micro_batch_size=2, replay_batch=2)
    sampling = dataclasses.replace(case.sampling, steps=3, seed=3)
    return Uneven(case, Run("picture", FlowGRPO(kl_coef=0.1), geometry, settings, sampling=sampling, prompts=rows))


def nft(case: Case, *rows: PromptRow, **settings: Any) -> Uneven:
    """One row and one time a forward: which expert it asks for is drawn."""
    sampling = dataclasses.replace(case.sampling, frames=1, seed=3)
    settings["ema"] = EMA(decay=0.5, warmup="constant", unit="rollout")
    return Uneven(case, Run("picture", DiffusionNFT(), POINT, settings, sampling=sampling, prompts=rows))


def sft(case: Case, geometry: DiffusionGeometry, **settings: Any) -> Uneven:
    sampling = dataclasses.replace(case.sampling, frames=1, guidance=1.0, negative_prompt="")
    algorithm = FlowSFT(seed=1, timesteps="uniform", shift=3.0)
    return Uneven(case, Run("picture", algorithm, geometry, settings, sampling=sampling))


EXPERTS = wan.CASES[1]
ONE_EXPERT = dataclasses.replace(
    EXPERTS, family=lambda folder: dataclasses.replace(wan.experts(folder), trained="high")
)
TALL, WIDE, BOTH = qwen_image_edit.sources(
    (qwen_image_edit.TALL,), (qwen_image_edit.WIDE,), (qwen_image_edit.TALL, qwen_image_edit.WIDE)
)
# The first rank gets three prompts, the second two.
ROLLOUTS = {
    "FLUX.3, windows": grpo(flux3.CASES[0], *prompts(SHORT, SHORT, SHORT, SHORT, LONG), **ADAPTER),
    "FLUX.3, some edits": grpo(
        flux3.CASES[1],
        *prompts(SHORT, LONG, SHORT, LONG, LONG, pictures=[[], [], [], flux2.PICTURES[:1], flux2.PICTURES[1:]]),
        gradient_checkpointing=True,
    ),
    "Qwen-Image-2.1": grpo(qwen_image_2_1.CASES[0], *prompts("one", "two", "six", "a three", "four"), **ADAPTER),
    "Qwen-Image-Edit": grpo(
        qwen_image_edit.CASES[0], *prompts(*"abcde", pictures=[TALL, TALL, TALL, WIDE, BOTH]), **ADAPTER
    ),
    "Cosmos 3": grpo(cosmos3.CASES[0], **ADAPTER),
    "Wan 2.2": grpo(EXPERTS, **ADAPTER),
    "Wan 2.2, experts": nft(EXPERTS),
    "Wan 2.2, one expert": nft(ONE_EXPERT, **ADAPTER),
}
RECORDS = {
    "FLUX.3": sft(flux3.CASES[0], DiffusionGeometry(micro_batch_size=2), **ADAPTER),
    "Qwen-Image-2.1": sft(qwen_image_2_1.CASES[0], DiffusionGeometry(micro_batch_size=2), **ADAPTER),
    "Wan 2.2": sft(EXPERTS, POINT, **ADAPTER),
    "Wan 2.2, one expert": sft(ONE_EXPERT, POINT, **ADAPTER),
}
FAST = ("FLUX.3, windows", "Wan 2.2, one expert")
ROLLOUT_NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ROLLOUTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Uneven], Run]:
    folders: dict[str, Path] = {}

    def of(uneven: Uneven) -> Run:
        case = uneven.case
        if case.name not in folders:
            folders[case.name] = case.write(tmp_path_factory.mktemp("uneven") / "model")
        return uneven.on(folders[case.name])

    return of


@pytest.mark.parametrize("name", ROLLOUT_NAMES)
def test_two_ranks_of_other_groups_and_experts_train_what_one_does(
    name: str, runs: Callable[[Uneven], Run], ranks: RankPool
) -> None:
    run = runs(ROLLOUTS[name])
    same(ranks(2, trained, run, FULL), trained(RankInfo(0, 1), run, FULL))


def supervised(info: RankInfo, run: Run, sharding: Sharding) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and figures after two steps on seven records; what `trained` is for rollouts."""
    draws = torch.Generator().manual_seed(0)
    pictures = torch.rand(7, 3, run.sampling.height, run.sampling.width, generator=draws)
    records = Records(pictures, [SHORT, LONG, SHORT, SHORT, LONG, SHORT, SHORT])
    backend = run.backend(info, sharding)
    encoder = SupervisedEncoder.on_rank(info, backend, run.sampling)
    stack = TrainStack.on_rank(info, backend, run.algorithm, run.geometry)
    figures = []
    for step in range(2):
        part = driven(encoder, "encode", RecordSampler(records, 7, seed=0).draw(step))
        figures.append(values(driven(stack, "train", Batch.of(part, seed=0, ranks=info.dp), Progress(step, 2))))
    return {key: whole(value.detach()) for key, value in backend.state()["parameters"].items()}, figures


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_two_ranks_of_other_captions_and_noise_levels_train_what_one_does(
    name: str, runs: Callable[[Uneven], Run], ranks: RankPool
) -> None:
    run = runs(RECORDS[name])
    same(ranks(2, supervised, run, FULL), supervised(RankInfo(0, 1), run, FULL))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_copies_of_two_ranks_train_what_one_does(name: str, runs: Callable[[Uneven], Run]) -> None:
    run = runs(ROLLOUTS[name])
    # DTensor remembers the groups of a mesh of two dimensions for the life of a process, and a pool makes new ones.
    with rank_pool() as fresh:
        same(fresh(4, trained, run, Sharding(mode="hybrid", group=2)), trained(RankInfo(0, 1), run, FULL))


@pytest.mark.slow
def test_pairs_of_ranks_that_split_a_sample_agree_on_experts(runs: Callable[[Uneven], Run], ranks: RankPool) -> None:
    run = runs(ROLLOUTS["Wan 2.2, one expert"])
    same(ranks(4, trained, run, FULL, dp=2, sp=2), trained(RankInfo(0, 1), run, FULL))
