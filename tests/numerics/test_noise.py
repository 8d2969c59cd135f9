"""Noise is a function of (seed, sample id): of no batch, no order and no number of workers."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import pytest
import torch

from unirl.sde.noise import StepNoise, initial_noise
from unirl.sde.schedule import pin, uniform_sigmas
from unirl.sde.solver import euler
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import FlowSDE
from unirl.sde.trajectory import sample_trajectory
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.seed import derive_seed, generator
from unirl.types.segment import LatentSegment

SHAPE = (2, 4, 4)
SAMPLING = DiffusionSamplingParams(steps=4, height=8, width=8)


def request(prompts: int, samples: int, rollout: int = 0) -> Sample:
    ids = [root_id(rollout, row) for row in range(prompts)]
    return Sample((Part(ids=ids, metadata=[{} for _ in ids]),)).fork(samples, SAMPLING)


def drift(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(latents)


def rolled_out(ids: list[str], seed: int = 0, *, same_in_group: bool = False) -> LatentSegment:
    sigmas = pin(uniform_sigmas(4))
    return sample_trajectory(
        drift,
        initial_noise(ids, SHAPE, seed, same_in_group=same_in_group),
        Schedule(sigmas, 1000 * sigmas[:-1]),
        strategy=FlowSDE(0.7),
        solver=euler,
        sde_indices=(0, 1, 2),
        noise=StepNoise(ids, seed),
        storage_dtype=torch.float32,
    )


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_sixteen_samples_have_sixteen_noises_however_many_workers_share_them(workers: int) -> None:
    """A seed of the index inside a worker's chunk would leave 4 of 16 at 4 workers."""
    whole = request(prompts=8, samples=2)
    expected = dict(zip(whole.frontier.ids, rolled_out(whole.frontier.ids).final, strict=True))
    drawn: dict[str, torch.Tensor] = {}
    for chunk in whole.split([8 // workers] * workers):
        drawn |= dict(zip(chunk.frontier.ids, rolled_out(chunk.frontier.ids).final, strict=True))
    assert set(drawn) == set(expected)
    assert all(torch.equal(drawn[sample_id], expected[sample_id]) for sample_id in expected)
    assert len(torch.unique(torch.stack(list(drawn.values())).flatten(1), dim=0)) == 16


def test_the_next_rollout_draws_other_noise() -> None:
    first, second = request(8, 2).frontier.ids, request(8, 2, rollout=1).frontier.ids
    seeds = [{derive_seed(0, purpose, i) for i in ids for purpose in ("x_T", "steps")} for ids in (first, second)]
    assert [len(own) for own in seeds] == [32, 32]
    assert not seeds[0] & seeds[1]
    assert not torch.isin(initial_noise(first, SHAPE, 0), initial_noise(second, SHAPE, 0)).any()


def test_a_batch_of_six_equals_two_and_four_and_the_reverse() -> None:
    ids = request(3, 2).frontier.ids
    whole = rolled_out(ids)
    split = LatentSegment.concat([rolled_out(ids[:2]), rolled_out(ids[2:])])
    assert torch.equal(split.latents, whole.latents)
    assert torch.equal(split.log_probs, whole.log_probs)
    backwards = rolled_out(ids[::-1])
    assert torch.equal(backwards.latents, whole.latents.flip(0))
    assert torch.equal(backwards.log_probs, whole.log_probs.flip(0))


def test_a_group_of_eight_has_eight_members_and_comes_again_bit_for_bit() -> None:
    ids = request(1, 8).frontier.ids
    first, second = rolled_out(ids), rolled_out(ids)
    assert torch.equal(first.latents, second.latents)
    assert len(torch.unique(first.final.flatten(1), dim=0)) == 8


def test_one_initial_noise_for_a_group_leaves_its_members_different() -> None:
    """x_T is that of the group, the noise of the steps that of the sample."""
    ids = request(2, 4).frontier.ids
    start = initial_noise(ids, SHAPE, 0, same_in_group=True)
    assert all(torch.equal(start[row], start[row // 4 * 4]) for row in range(8))
    assert not torch.equal(start[0], start[4])
    final = rolled_out(ids, same_in_group=True).final
    assert len(torch.unique(final.flatten(1), dim=0)) == 8


def test_seed_zero_is_a_seed() -> None:
    ids = request(1, 2).frontier.ids
    finals = {seed: rolled_out(ids, seed).final for seed in (0, 17, 1)}
    for seed, final in finals.items():
        assert torch.equal(final, rolled_out(ids, seed).final)
    assert not torch.equal(finals[0], finals[17])
    assert not torch.equal(finals[0], finals[1])


def test_initial_and_step_noise_are_streams_of_their_own() -> None:
    ids = request(2, 2).frontier.ids
    assert not torch.equal(initial_noise(ids, SHAPE, 0), StepNoise(ids, 0).draw(SHAPE))


def test_step_noise_is_what_a_generator_of_the_request_draws_in_step_order() -> None:
    ids = request(1, 3).frontier.ids
    noise = StepNoise(ids, 11)
    ours = [noise.draw(SHAPE) for _ in range(3)]
    for row, sample_id in enumerate(ids):
        engine = torch.Generator().manual_seed(derive_seed(11, "steps", sample_id))
        for step in range(3):
            assert torch.equal(ours[step][row], torch.randn(SHAPE, generator=engine))


def test_a_half_used_noise_continues_after_pickling() -> None:
    noise = StepNoise(["r0.p0/0"], 0)
    for _ in range(10):
        noise.draw(SHAPE)
    shipped = pickle.loads(pickle.dumps(noise))
    assert torch.equal(shipped.draw(SHAPE), noise.draw(SHAPE))


def test_seeds_are_the_same_in_another_process() -> None:
    """Python's own hash of a string is not."""
    code = "from unirl.types.seed import derive_seed; print(derive_seed(0, 'x_T', 'r0.p0/0'))"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(other.stdout) == derive_seed(0, "x_T", "r0.p0/0")


def test_a_seed_is_pinned() -> None:
    """Recorded runs reproduce only while this number stands."""
    assert derive_seed(0, "x_T", "r0.p0/0") == 467980907363266445
    assert derive_seed(1) != derive_seed("1")
    assert derive_seed(12, "a") != derive_seed(1, "2a")


def test_drawing_leaves_torchs_own_stream_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(4)
    torch.manual_seed(0)
    rolled_out(["r0.p0/0"])
    generator(0, "anything")
    assert torch.equal(torch.randn(4), expected)


def test_noise_is_standard_normal() -> None:
    drawn = initial_noise([f"r0.p{row}/0" for row in range(64)], (16, 16), 3)
    assert drawn.dtype == torch.float32
    assert drawn.mean().item() == pytest.approx(0.0, abs=4 / 128)
    assert drawn.std().item() == pytest.approx(1.0, abs=4 / math.sqrt(2 * drawn.numel()))
    rows = torch.corrcoef(drawn.flatten(1))
    assert (rows - torch.eye(64)).abs().max() < 0.3  # 5 standard errors of 1/16: samples are independent
