"""Faults of training on several ranks: unequal terms, work, pictures; one bad gradient; weights outside of blocks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from tests.tiny_language_policy import SMALL_LM, language_policy, scored, text, written
from tests.tiny_policy import SMALL, START, rows_of
from tests.unit.models.vision_language import tiny as vision
from unirl.algorithms.base import AlgorithmOutput, Context, Needs
from unirl.algorithms.diffusion_base import Anchors, DiffusionAlgorithm
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.token_base import ARContext, TokenAnchors
from unirl.algorithms.token_sft import TokenSFT
from unirl.distributed.group.rank_info import RankInfo
from unirl.models.language.vision_language import VisionLanguage
from unirl.models.random_weights.folders import folder_of
from unirl.train.backend.config import ARBackendConfig, DiffusionBackendConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.sharding import Sharded, Sharding
from unirl.train.dtensor import whole
from unirl.train.ema import EMA
from unirl.train.optim import AdamW
from unirl.train.stack.base import TrainStack
from unirl.train.stack.planner import Batch, DiffusionGeometry, Geometry, TokenGeometry
from unirl.types.metric import Metrics, values
from unirl.types.sample import Part

MODES = (Sharding(), Sharding(mode="none"))
# With beta1 = 0 the first moment is the gradient of the last step; a large eps makes the step proportional to it.
PLAIN = AdamW(lr=1e-2, betas=(0.0, 0.999), eps=1.0, weight_decay=0.0)


@dataclasses.dataclass(frozen=True)
class Distinct(DiffusionAlgorithm):
    """Row k has the loss `A_k w_k`, with a weight of its own: its gradient is A_k over the terms of the step."""

    @property
    def needs(self) -> Needs:
        return Needs(trajectory=False)

    def columns(self, part: Part) -> int:
        return 1

    def anchors(self, context: Context, part: Part, columns: slice) -> Anchors | None:
        return None

    def loss(self, context: Context, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
        assert part.advantages is not None
        bundle, own = context.stage.bundle, [int(sample_id.rsplit("/", 1)[1]) for sample_id in part.ids]
        flat = bundle.run(lambda: next(bundle.transformer.parameters()).flatten()[own])
        return AlgorithmOutput((part.advantages * flat)[:, None])


def diffusion_backend(info: RankInfo, sharding: Sharding, **settings: Any) -> FSDPBackend:
    config = DiffusionBackendConfig(**{"optimizer": PLAIN, "max_grad_norm": None, "sharding": sharding, **settings})
    return FSDPBackend.on_rank(
        info, SMALL, config, device=torch.device("cpu"), seed=0, total_steps=10, with_reference=False
    )


def language_backend(info: RankInfo, sharding: Sharding) -> FSDPBackend:
    config = ARBackendConfig(optimizer=PLAIN, max_grad_norm=None, sharding=sharding)
    return FSDPBackend.on_rank(
        info, SMALL_LM, config, device=torch.device("cpu"), seed=0, total_steps=10, with_reference=False
    )


def share(info: RankInfo, batch: Batch, sizes: list[int]) -> Batch:
    """The rows of this rank; one rank has all of them."""
    return batch if info.dp == 1 else batch.split(sizes)[info.dp_rank]


def gradient(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    """That of the last step, whole."""
    return {name: whole(moments["exp_avg"]) for name, moments in backend.state()["optimizer"].items()}


def weights(backend: FSDPBackend) -> dict[str, torch.Tensor]:
    return {name: whole(value.detach()).clone() for name, value in backend.state()["parameters"].items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


def unequal(info: RankInfo, sharding: Sharding, clip: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Five terms on one rank, one on the other: what six weights get of it, and all weights after the step."""
    backend = diffusion_backend(info, sharding, max_grad_norm=clip)
    stack = TrainStack.on_rank(info, backend, Distinct(), DiffusionGeometry())
    stack.train(share(info, Batch.of(rows_of([1.0] * 6), 0, info.dp), [5, 1]), START)
    name = next(iter(backend.state()["parameters"]))
    return gradient(backend)[name].flatten()[:6], weights(backend)


@pytest.mark.parametrize("sharding", MODES, ids=lambda sharding: sharding.mode)
def test_a_term_weighs_the_same_on_a_rank_with_few_of_them(sharding: Sharding, ranks: RankPool) -> None:
    for clip, expected in ((None, 1 / 6), (0.1, 0.1 / math.sqrt(6))):
        alone = unequal(RankInfo(0, 1), sharding, clip)[1]
        for own, after in ranks(2, unequal, sharding, clip):
            torch.testing.assert_close(own, torch.full((6,), expected), rtol=1e-4, atol=0)
            same(after, alone)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(GRPO):
    """Counts its forwards with gradient."""

    counts: list[int] = dataclasses.field(default_factory=list)

    def loss(self, context: ARContext, part: Part, anchors: TokenAnchors | None) -> AlgorithmOutput:
        self.counts.append(len(part))
        return super().loss(context, part, anchors)


def uneven(info: RankInfo, sizes: list[int]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Rows that fill a token budget each, beside short ones that fit into it together."""
    backend, algorithm = language_backend(info, Sharding()), Counted(kl_coef=0.0)
    long = written(language_policy(), prompts=("0123456789a",), group=5, stop_token_ids=())
    short = written(language_policy(), number=1, prompts=("3",), group=5, max_new_tokens=1)
    part = scored(Part.concat([long, dataclasses.replace(short, sampling=long.sampling)]), [0.0, 1, 2, 3, 5] * 2)
    part = part.select([*range(5), *range(5, sum(sizes))])
    stack = TrainStack.on_rank(info, backend, algorithm, TokenGeometry(token_budget=20))
    stack.train(share(info, Batch.of(part, 0, info.dp), sizes), START)
    return algorithm.counts, gradient(backend)


@pytest.mark.parametrize("sizes", [[5, 5], [5, 1]])
def test_ranks_do_equally_many_forwards_whatever_their_rows_need(sizes: list[int], ranks: RankPool) -> None:
    _, alone = uneven(RankInfo(0, 1), sizes)
    (busy, first), (light, second) = ranks(2, uneven, sizes)
    assert len(busy) == len(light) == 5
    assert sum(light[: len(light) - 4]) <= sizes[1]
    same(first, alone)
    same(second, alone)


def nobody(info: RankInfo, sharding: Sharding) -> tuple[dict[str, torch.Tensor], Metrics]:
    """One row for two ranks, and a row without a reward that would be the other rank's."""
    backend = language_backend(info, sharding)
    part = scored(written(language_policy(), prompts=("12",), group=2), [1.0, 2.0]).select([1])
    batch = Batch.of(part, 0, info.dp)
    report = TrainStack.on_rank(info, backend, GRPO(kl_coef=0.0), TokenGeometry()).train(
        batch if info.dp == 1 else batch.split([1, 1])[info.dp_rank], START
    )
    return gradient(backend), report


@pytest.mark.parametrize("sharding", MODES, ids=lambda sharding: sharding.mode)
def test_a_rank_without_rows_takes_the_steps_of_the_others(sharding: Sharding, ranks: RankPool) -> None:
    alone, _ = nobody(RankInfo(0, 1), sharding)
    (first, told), (second, untold) = ranks(2, nobody, sharding)
    same(first, alone)
    same(second, alone)
    assert "train/loss" in told
    assert not untold  # what is the same on all ranks is told once


def one_bad(info: RankInfo, sharding: Sharding) -> list[Any]:
    """A NaN on the second rank, then a good batch."""
    backend = diffusion_backend(info, sharding, ema=EMA(decay=0.5, warmup="constant"))
    stack = TrainStack.on_rank(info, backend, Distinct(), DiffusionGeometry())
    before, told = weights(backend), []
    for advantages in ([1.0, 2.0, 3.0, math.nan], [1.0, 2.0, 3.0, 4.0]):
        told.append(stack.train(share(info, Batch.of(rows_of(advantages), 0, info.dp), [2, 2]), START))
        told.append((weights(backend), backend.version, backend.state()["ema_updates"], backend.state()["steps"]))
    return [before, *told]


@pytest.mark.parametrize("sharding", MODES, ids=lambda sharding: sharding.mode)
def test_all_ranks_skip_the_step_whose_gradient_is_bad_on_one(sharding: Sharding, ranks: RankPool) -> None:
    skips = []
    for before, report, (after, version, updates, steps), _, good in ranks(2, one_bad, sharding):
        same(after, before, tolerance=0)
        assert (version, updates, steps) == (0, 0, 0)
        assert good[1:] == (1, 1, 1)
        assert not all(torch.equal(good[0][name], before[name]) for name in before)
        skips.append(values(report))
    assert sum(report["train/skipped"] for report in skips if "train/skipped" in report) == 1


def different_data(info: RankInfo, sharding: Sharding) -> dict[str, torch.Tensor]:
    backend = language_backend(info, sharding)
    stack = TrainStack.on_rank(info, backend, GRPO(kl_coef=0.0), TokenGeometry())
    for number in range(3):
        part = scored(written(language_policy(), number=number), [0.0, 1.0, 5.0, 2.0])
        stack.train(share(info, Batch.of(part, 0, info.dp), [2, 2]), START)
    return weights(backend)


@pytest.mark.parametrize("sharding", MODES, ids=lambda sharding: sharding.mode)
def test_weights_outside_of_blocks_stay_the_same_on_all_ranks(sharding: Sharding, ranks: RankPool) -> None:
    """Embedding, head and last norm are in no block."""
    first, second = ranks(2, different_data, sharding)
    assert any("layers" not in name for name in first)
    same(first, second, tolerance=0)
    same(first, different_data(RankInfo(0, 1), sharding), tolerance=1e-5)


def recorded(info: RankInfo, sync: Any) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Whether each of three micro-batches adds its gradient up over the ranks."""
    backend, flags = diffusion_backend(info, Sharding(sync=sync)), list[bool]()
    spread = backend.spread
    assert isinstance(spread, Sharded)

    @dataclasses.dataclass(frozen=True)
    class Watched(Distinct):
        def loss(self, context: Context, part: Part, columns: slice, anchors: Anchors | None) -> AlgorithmOutput:
            flags.append(spread.modules[0]._get_fsdp_state()._fsdp_param_groups[0].reduce_grads)
            return super().loss(context, part, columns, anchors)

    stack = TrainStack.on_rank(info, backend, Watched(), DiffusionGeometry(micro_batch_size=1))
    stack.train(share(info, Batch.of(rows_of([1.0, 2.0, 3.0, 4.0, 5.0]), 0, info.dp), [3, 2]), START)
    return flags, gradient(backend)


def test_gradients_add_up_at_the_last_micro_batch_alone_and_are_those_of_every_one(ranks: RankPool) -> None:
    last, each = ranks(2, recorded, "last"), ranks(2, recorded, "each")
    assert [flags for flags, _ in last] == [[False, False, True]] * 2  # the second rank's last one is idle
    assert [flags for flags, _ in each] == [[True, True, True]] * 2
    same(last[0][1], each[0][1])


def seeing(info: RankInfo, folder: Path, sharding: Sharding) -> tuple[dict[str, torch.Tensor], float]:
    """A prompt with pictures on one rank, one without on the other; the tower is trained."""
    config = ARBackendConfig(optimizer=PLAIN, max_grad_norm=None, sharding=sharding)
    family = VisionLanguage(str(folder), trained="all")
    backend = FSDPBackend.on_rank(info, family, config, device=vision.CPU, seed=0, total_steps=10, with_reference=False)
    with torch.no_grad(), backend.gathered():
        part = vision.written(backend.stage, vision.uneven())
    stack = TrainStack.on_rank(info, backend, TokenSFT(), Geometry())
    stack.train(share(info, Batch.of(part, 0, info.dp), [2, 2]), START)
    found = gradient(backend)
    return found, float(sum(value.abs().sum() for name, value in found.items() if "visual" in name))


@pytest.mark.parametrize("sharding", MODES, ids=lambda sharding: sharding.mode)
def test_pictures_on_one_rank_alone_train_the_tower_of_all(sharding: Sharding, ranks: RankPool) -> None:
    folder = folder_of("qwen3_vl")
    alone, tower = seeing(RankInfo(0, 1), folder, sharding)
    assert tower > 0
    for found, _ in ranks(2, seeing, folder, sharding):
        same(found, alone, tolerance=1e-5)


def refused(info: RankInfo) -> str:
    sharding = Sharding(blocks=("JointTransformerBlock", "NoSuchBlock"))
    with pytest.raises(ValueError, match="NoSuchBlock") as caught:
        diffusion_backend(info, sharding)
    return str(caught.value)


def test_a_block_that_there_is_not_is_refused_with_those_that_there_are(ranks: RankPool) -> None:
    assert "JointTransformerBlock" in ranks(2, refused)[0].split("name some of")[1]


def test_a_row_is_in_the_same_update_wherever_it_is_trained() -> None:
    part = scored(written(language_policy(), prompts=("12", "3", "0"), group=2), [0.0, 1, 2, 3, 4, 5])
    batch = Batch.of(part, 7, ranks=1)
    of = {sample_id: int(place) // 3 for sample_id, place in zip(part.ids, batch.places, strict=True)}
    shards = Batch.of(part, 7, ranks=4).split([2, 2, 1, 1])
    assert {
        sample_id: int(place) // 3
        for shard in shards
        for sample_id, place in zip(shard.part.ids, shard.places, strict=True)
    } == of
    assert len(text(part).lengths) == 6
