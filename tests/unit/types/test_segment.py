"""Recorded trajectories and tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from unirl.types.segment import CleanLatents, LatentSegment, TextSegment


def trajectory(count: int = 2) -> LatentSegment:
    """T = 4, SDE steps 0 and 2: positions 0, 1, 2, 3, 4. The latent at position p of row r is 10 r + p."""
    positions = torch.arange(5)
    return LatentSegment(
        latents=(10 * torch.arange(count)[:, None] + positions)[:, :, None].expand(count, 5, 3).contiguous().float(),
        positions=positions,
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        times=torch.tensor([1000.0, 750.0, 500.0, 250.0]),
        sde_indices=torch.tensor([0, 2]),
        log_probs=torch.zeros(count, 2),
    )


def sparse() -> LatentSegment:
    """The same with SDE step 1 alone: positions 1, 2 and 4."""
    kept = torch.tensor([1, 2, 4])
    whole = trajectory()
    return dataclasses.replace(
        whole,
        latents=whole.latents[:, kept],
        positions=kept,
        sde_indices=torch.tensor([1]),
        log_probs=torch.zeros(2, 1),
    )


def test_latents_are_found_by_position() -> None:
    assert sparse().at(torch.tensor([2, 1]))[:, :, 0].tolist() == [[2, 1], [12, 11]]
    assert sparse().final[:, 0].tolist() == [4, 14]
    assert sparse().num_steps == 4


@pytest.mark.parametrize("positions", [[0], [3], [5], [1, 3]], ids=str)
def test_a_position_that_was_not_recorded_is_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"are not all recorded: \[1, 2, 4\]"):
        sparse().at(torch.tensor(positions))


def test_rows_keep_their_trajectory_and_share_its_schedule() -> None:
    chosen = trajectory(3).select([2, 0])
    assert chosen.final[:, 0].tolist() == [24, 4]
    assert chosen.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": torch.zeros(5)}, "5 sigmas are 4 steps, got 5 model times"),
        ({"positions": torch.arange(4)}, "5 latents are recorded for 4 positions"),
        ({"positions": torch.tensor([0, 1, 2, 4, 3])}, "must be sorted and distinct"),
        ({"positions": torch.tensor([0, 1, 2, 3, 3])}, "must be sorted and distinct"),
        ({"positions": torch.tensor([0, 1, 2, 3, 5])}, r"are outside 0\.\.4 of a schedule of 4 steps"),
        ({"positions": torch.tensor([-1, 0, 1, 2, 3])}, r"are outside 0\.\.4 of a schedule of 4 steps"),
        ({"log_probs": torch.zeros(2, 3)}, r"log_probs \(2, 3\) do not fit 2 SDE steps"),
        ({"unconditional": torch.zeros(2, 3, 3)}, "3 unconditional velocities do not fit 2 SDE steps"),
        ({"log_probs": torch.zeros(3, 2)}, "fields disagree on the number of rows"),
        ({"sde_indices": torch.tensor([2, 0])}, "must be sorted and distinct"),
        ({"sde_indices": torch.tensor([0, 3])}, r"SDE steps \[0, 3\] are outside 0\.\.2 of a schedule of 4 steps"),
        ({"sde_indices": torch.tensor([-1, 0])}, "are outside"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(list(value)),
)
def test_what_cannot_be_replayed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(trajectory(), **change)


def test_both_ends_of_a_stochastic_step_must_be_recorded() -> None:
    with pytest.raises(ValueError, match=r"SDE steps \[2\] need latents at positions \[3\], recorded are \[1, 2, 4\]"):
        dataclasses.replace(sparse(), sde_indices=torch.tensor([2]))


def test_an_ode_rollout_has_no_log_probs() -> None:
    whole = trajectory()
    ode = dataclasses.replace(
        whole,
        latents=whole.latents[:, -1:],
        positions=torch.tensor([4]),
        sde_indices=torch.tensor([], dtype=torch.long),
        log_probs=torch.zeros(2, 0),
    )
    assert ode.final.shape == (2, 3)
    assert LatentSegment.concat(ode.split([1, 1])).log_probs.shape == (2, 0)


def test_the_unconditional_velocity_follows_its_rows() -> None:
    segment = dataclasses.replace(trajectory(3), unconditional=torch.arange(3)[:, None, None].expand(3, 2, 3).float())
    chosen = segment.select([2, 1]).unconditional
    assert chosen is not None
    assert chosen[:, 0, 0].tolist() == [2, 1]


def test_tokens_of_different_length_stay_with_their_row() -> None:
    lengths = torch.tensor([2, 0, 3])
    text = TextSegment(
        tokens=torch.tensor([1, 2, 5, 6, 7]),
        log_probs=-torch.tensor([1.0, 2, 5, 6, 7]),
        loss_mask=torch.tensor([True, False, True, True, True]),
        lengths=lengths,
        truncated=torch.tensor([False, False, True]),
    )
    chosen = text.select([2, 0])
    assert chosen.tokens.tolist() == [5, 6, 7, 1, 2]
    assert chosen.log_probs.tolist() == [-5, -6, -7, -1, -2]
    assert chosen.loss_mask.tolist() == [True, True, True, True, False]
    assert chosen.lengths.tolist() == [3, 2]
    assert TextSegment.concat(text.split([1, 2])).tokens.tolist() == text.tokens.tolist()


def test_clean_latents_are_rows() -> None:
    assert CleanLatents(torch.arange(6.0).reshape(3, 2)).select([1]).latents.tolist() == [[2, 3]]
