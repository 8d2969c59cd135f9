"""Dynamic sampling, the penalty of long responses, and what is said of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.algorithms.closed_form import responses_of
from unirl.algorithms.token_base import responses
from unirl.trainer.responses import Overlong, ResponseConfig, response_metrics
from unirl.types.metric import Metrics, values
from unirl.types.reward import Scores
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams

SAMPLING = ARSamplingParams(max_new_tokens=8)


def groups(rewards: list[list[float]], *, first: int = 0, length: int = 2, **segment: torch.Tensor) -> Part:
    """A scored part with a group for each list of rewards."""
    total = torch.tensor([reward for group in rewards for reward in group])
    ids = [f"r0.p{first + number}/{child}" for number, group in enumerate(rewards) for child in range(len(group))]
    part = Part(
        ids=ids,
        metadata=[{} for _ in ids],
        sampling=SAMPLING,
        segment=responses_of([length] * len(ids), **segment),
    )
    return part.with_rewards(Scores(total, {"judge": total}, [()] * len(ids)))


def scripted(*draws: list[list[float]]) -> tuple[Callable[[int, int], Part], list[tuple[int, int]]]:
    """Draws that give these rewards, and a record of what was asked for."""
    asked: list[tuple[int, int]] = []

    def draw(number: int, count: int) -> Part:
        asked.append((number, count))
        return groups(draws[number][:count], first=10 * number)

    return draw, asked


def gathered(config: ResponseConfig, prompts: int, draw: Callable[[int, int], Part]) -> tuple[list[str], Metrics]:
    part, metrics = config.gathered(prompts, draw)
    return list(dict.fromkeys(part.groups("group"))), metrics


def test_off_it_takes_the_rollout_as_it_is() -> None:
    draw, asked = scripted([[1, 1], [0, 1]])
    assert gathered(ResponseConfig(), 2, draw) == (["r0.p0", "r0.p1"], {})
    assert asked == [(0, 2)]


def test_groups_of_equal_rewards_give_their_places_to_further_prompts() -> None:
    draw, asked = scripted([[1, 1], [0, 1], [0, 0]], [[0, 2], [3, 3]], [[4, 5]])
    names, metrics = gathered(ResponseConfig(max_draws=5), 3, draw)
    assert names == ["r0.p1", "r0.p10", "r0.p20"]
    assert asked == [(0, 3), (1, 2), (2, 1)]
    assert values(metrics) == {
        "rollout/extra_draws": 2.0,
        "rollout/equal_groups": 3.0,
        "rollout/open_places": 0.0,
        "rollout/drawn_reward": pytest.approx((2 + 1 + 0 + 2 + 6 + 9) / 12),
    }


def test_nothing_further_is_drawn_where_all_groups_teach() -> None:
    draw, asked = scripted([[1, 0], [0, 1]])
    names, metrics = gathered(ResponseConfig(max_draws=5), 2, draw)
    assert (names, asked) == (["r0.p0", "r0.p1"], [(0, 2)])
    assert metrics["rollout/extra_draws"].value == 0


def test_at_the_bound_equal_groups_keep_the_open_places_so_that_a_step_keeps_its_size() -> None:
    draw, asked = scripted([[1, 1], [0, 1], [0, 0]], [[2, 2], [3, 3]], [[5, 5], [6, 6]])
    part, metrics = ResponseConfig(max_draws=2).gathered(3, draw)
    assert asked == [(0, 3), (1, 2), (2, 2)]
    assert list(dict.fromkeys(part.groups("group"))) == ["r0.p1", "r0.p0", "r0.p2"]
    assert metrics["rollout/open_places"].value == 2
    assert part.compute_advantages().advantages.tolist()[2:] == [0.0] * 4  # type: ignore[union-attr]


def test_a_group_is_judged_by_its_finite_rewards() -> None:
    """One finite reward, or none, compares with nothing."""
    draw, _ = scripted([[math.nan, 1, 1], [math.nan, 1, 0], [math.nan, math.nan, 1], [math.nan] * 3], [[0, 0, 1]] * 3)
    names, metrics = gathered(ResponseConfig(max_draws=1), 4, draw)
    assert names == ["r0.p1", "r0.p10", "r0.p11", "r0.p12"]
    assert metrics["rollout/equal_groups"].value == 3


def test_the_overlong_penalty_enters_the_reward_with_its_weight_and_is_a_component() -> None:
    """At most 8 tokens and a buffer of 4: 4 tokens cost nothing, 6 half, 8 all."""
    config = ResponseConfig(overlong=Overlong(buffer=4, weight=2.0))
    for length, penalty in ((4, 0.0), (6, -0.5), (8, -1.0)):
        part = config.shaped(groups([[1.0, math.nan]], length=length), SAMPLING)
        assert part.rewards is not None
        assert part.reward_components is not None
        assert part.rewards[0] == 1 + 2 * penalty
        assert math.isnan(part.rewards[1])
        assert part.reward_components["overlong"].tolist() == [penalty] * 2
        assert part.reward_components["judge"][0] == 1


def test_groups_of_equal_rewards_that_keep_open_places_teach_nothing_by_their_lengths_either() -> None:
    """The second group keeps a place, and its responses cost the penalty that the first one's enter with."""
    config = ResponseConfig(max_draws=1, overlong=Overlong(buffer=4))
    lengths = [6, 4, 8, 4]
    given = dataclasses.replace(groups([[1, 0], [0, 0]]), segment=responses_of(lengths))
    part = config.shaped(given, SAMPLING).compute_advantages(scale="none")
    assert part.rewards is not None
    assert part.advantages is not None
    assert part.rewards.tolist() == [0.5, 0, 0, 0]
    assert part.advantages.tolist() == [0.25, -0.25, 0, 0]
    plain = ResponseConfig(overlong=Overlong(buffer=4)).shaped(given, SAMPLING)
    assert plain.rewards is not None
    assert plain.rewards.tolist() == [0.5, 0, -1, 0], "without dynamic sampling every group is shaped"


def test_responses_that_were_cut_off_are_not_trained_and_keep_their_rewards() -> None:
    given = groups([[1, 3]], truncated=torch.tensor([True, False]))
    part = ResponseConfig(mask_truncated=True).shaped(given, SAMPLING)
    assert responses(part).loss_mask.tolist() == [False, False, True, True]
    assert part.compute_advantages(scale="none").advantages.tolist() == [-1, 1]  # type: ignore[union-attr]
    assert responses(ResponseConfig().shaped(given, SAMPLING)).loss_mask.all()


def test_tokens_that_were_masked_before_stay_so() -> None:
    given = groups([[1, 3]], loss_mask=torch.tensor([True, False, True, False]))
    part = ResponseConfig(mask_truncated=True).shaped(given, SAMPLING)
    assert responses(part).loss_mask.tolist() == [True, False, True, False]


def test_figures_of_responses() -> None:
    part = groups([[1, 3, 1, 3]], length=3, truncated=torch.tensor([True, False, False, False]))
    assert values(response_metrics(part)) == {"rollout/tokens": 3.0, "rollout/truncated": 0.25}


@pytest.mark.parametrize(
    ("cls", "settings", "said"),
    [
        (ResponseConfig, {"max_draws": -1}, "max_draws must not be negative"),
        (Overlong, {"buffer": 0}, "buffer must be at least 1 and weight positive, got 0 and 1.0"),
        (Overlong, {"buffer": 2, "weight": 0.0}, "got 2 and 0.0"),
    ],
)
def test_settings_that_do_nothing_are_refused(cls: type, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cls(**settings)


def test_what_does_not_fit_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlong.buffer=9 is more than sampling.max_new_tokens=8: about a fifth"):
        ResponseConfig(overlong=Overlong(buffer=9)).check(4, SAMPLING)
    with pytest.raises(ValueError, match=r"as a group of data.samples_per_prompt=1 always has"):
        ResponseConfig(max_draws=2).check(1, SAMPLING)
    ResponseConfig(overlong=Overlong(buffer=8), max_draws=2).check(2, SAMPLING)
