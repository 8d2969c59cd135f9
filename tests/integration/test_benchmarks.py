"""What `make bench` measures does its step: each side of each workload, once and small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import ar_step, diffusion_step
from benchmarks.ar_step import TextWorkload
from benchmarks.bare_loop import Workload
from benchmarks.driver import PICTURES, TEXTS, measure_driver
from benchmarks.ray_step import measure_ray_step
from benchmarks.scored_rollout import Overlap, measure_overlap
from unirl.distributed.group.placement import Placement
from unirl.models.random_weights.sd3 import write
from unirl.models.tiny_language import TinyLM

SMALL = Workload(group=2, steps=3, trained=1)


def test_the_benchmark_of_the_overlap_scores_a_rollout_both_ways(tmp_path: Path) -> None:
    cost = measure_overlap(write(tmp_path / "sd3"), Placement(device="cpu"), chunks=2, group=2, steps=2, repeats=1)
    assert min(cost.rollout, cost.reward, cost.chunked) > 0
    assert Overlap(chunks=4, rollout=1.0, reward=1.0, chunked=1.25).ratio == 0.625
    assert Overlap(chunks=4, rollout=1.0, reward=1.0, chunked=1.25).best == 0.625
    assert Overlap(chunks=4, rollout=1.0, reward=3.0, chunked=3.5).best == 0.8125


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_benchmark_of_ray_takes_the_same_step_by_each_launcher(ray: None) -> None:
    cost = measure_ray_step(1, ("data.prompts_per_step=2", "data.samples_per_prompt=2", "sampling.steps=4"))
    assert min(cost.local, cost.one, cost.two) > 0


def test_both_sides_of_the_diffusion_benchmark_take_a_step(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "sd3")
    with Placement(device="cpu").slab() as slab:
        product = diffusion_step.Product(slab, checkpoint, SMALL)
        before = product.backend.state()["version"]
        product.step()
        assert product.backend.state()["version"] == before + 1
    diffusion_step.Bare(checkpoint, SMALL).step()


@pytest.mark.parametrize("lora", [None, 2])
def test_both_sides_of_the_language_benchmark_write_their_tokens(tmp_path: Path, lora: int | None) -> None:
    family = TinyLM(layers=1, width=16, heads=2)
    family.save(family.load(torch.device("cpu"), torch.float32), tmp_path / "model")
    work = TextWorkload(tmp_path / "model", ("ab:", "c:"), group=2, max_new_tokens=4, lora=lora, endless=True)
    with Placement(device="cpu").slab() as slab:
        assert [cost.tokens for cost in ar_step.Product(slab, work).steps(2)] == [16.0, 16.0]
    assert [cost.tokens for cost in ar_step.Bare(work).steps(1)] == [16.0]


def test_what_passes_the_driver_grows_with_ranks_and_not_with_the_size_of_pictures() -> None:
    small = dataclasses.replace(PICTURES, settings=(*PICTURES.settings, "sampling.height=256", "sampling.width=256"))
    two, four, eight = (
        measure_driver(load, ranks, repeats=1).bytes for load, ranks in ((PICTURES, 2), (PICTURES, 4), (PICTURES, 8))
    )
    assert measure_driver(small, 4, repeats=1).bytes == pytest.approx(four, rel=0.01)
    assert four / two == pytest.approx(2, rel=0.05)
    assert eight / four == pytest.approx(2, rel=0.05)


def test_a_driver_of_language_models_takes_its_step() -> None:
    cost = measure_driver(TEXTS, 2, repeats=1)
    tokens = 2 * TEXTS.prompts * TEXTS.group * 512
    assert cost.bytes > tokens * (8 + 4 + 1)
    assert cost.total > 0
