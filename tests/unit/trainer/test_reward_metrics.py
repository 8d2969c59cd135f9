from __future__ import annotations

import math

import pytest
import torch

from unirl.trainer.rl import AdvantageConfig, reward_metrics
from unirl.types.metric import values
from unirl.types.reward import Failure, Scores
from unirl.types.sample import Part
from unirl.types.sampling import DiffusionSamplingParams

SAMPLING = DiffusionSamplingParams(steps=2, height=8, width=8)


def part(groups: list[list[float]], **components: list[float]) -> Part:
    """A scored part, one group a list; components default to the total alone."""
    ids = [f"r0.p{row}/{child}" for row, group in enumerate(groups) for child in range(len(group))]
    rewards = [reward for group in groups for reward in group]
    columns = {name: torch.tensor(column) for name, column in (components or {"judge": rewards}).items()}
    failures = [() if math.isfinite(reward) else (Failure("judge", "broken"),) for reward in rewards]
    scores = Scores(total=torch.tensor(rewards), components=columns, failures=failures)
    return Part(ids=ids, metadata=[{} for _ in ids], sampling=SAMPLING).with_rewards(scores).compute_advantages()


def figures(groups: list[list[float]], **components: list[float]) -> dict[str, float]:
    return values(reward_metrics(part(groups, **components)))


def test_the_spread_inside_groups_and_of_all_rewards_have_names_of_their_own() -> None:
    found = figures([[0.0, 1.0], [10.0, 11.0]])
    assert found["reward/group_std"] == 0.5
    assert found["reward/std"] == pytest.approx(5.0249378, abs=1e-7)
    assert (found["reward/mean"], found["reward/min"], found["reward/max"]) == (5.5, 0.0, 11.0)


def test_the_mean_of_a_single_scorer_is_the_mean_of_the_reward() -> None:
    found = figures([[0.1, 0.7], [0.2, 0.3]])
    assert found["reward/judge"] == found["reward/mean"] == pytest.approx(0.325)


def test_scorers_are_told_unweighted() -> None:
    found = figures([[1.0, 2.0]], shape=[2.0, 4.0], size=[0.0, 1.0])
    assert (found["reward/shape"], found["reward/size"], found["reward/mean"]) == (3.0, 0.5, 1.5)


def test_invalid_samples_are_counted_and_left_out_of_every_figure() -> None:
    found = figures([[math.nan, 1.0, 3.0], [5.0, math.inf, 5.0]], judge=[math.nan, 1.0, 3.0, 5.0, math.inf, 5.0])
    assert found["reward/invalid"] == 2
    assert found["reward/mean"] == found["reward/judge"] == 3.5
    assert (found["reward/min"], found["reward/max"]) == (1.0, 5.0)
    assert found["reward/group_std"] == pytest.approx((1.0 + 0.0) / 2)
    assert found["reward/std"] == pytest.approx(math.sqrt((2.5**2 + 0.5**2 + 1.5**2 + 1.5**2) / 4))


def test_a_batch_without_a_valid_sample_has_no_figures_but_its_count() -> None:
    found = figures([[math.nan, math.nan]])
    assert found["reward/invalid"] == 2
    assert not {"reward/mean", "reward/std", "reward/group_std", "reward/min", "reward/max"} & found.keys()
    assert math.isnan(found["reward/judge"])


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], 0.0),
        ([[1.0, 1.0], [3.0, 4.0]], 0.5),
        ([[1.0, 1.0], [2.0, 2.0]], 1.0),
        ([[1.0, math.nan], [2.0, 3.0]], 0.5),  # one valid sample has nothing to be compared with
    ],
)
def test_the_share_of_groups_without_an_advantage_is_told(groups: list[list[float]], share: float) -> None:
    assert figures(groups)["advantage/constant_groups"] == share


def test_a_group_that_is_constant_learns_from_the_others_under_a_global_scope() -> None:
    scored = part([[1.0, 1.0], [2.0, 2.0]]).compute_advantages("global")
    assert values(reward_metrics(scored))["advantage/constant_groups"] == 0.0


def test_figures_do_not_depend_on_the_order_of_the_groups() -> None:
    one, other = figures([[0.0, 1.0], [5.0, 7.0]]), figures([[7.0, 5.0], [1.0, 0.0]])
    assert one == other


def test_an_epsilon_that_would_turn_advantages_around_is_refused() -> None:
    assert AdvantageConfig(eps=0.0).eps == 0.0
    with pytest.raises(ValueError, match=r"eps must not be negative, got -0\.1"):
        AdvantageConfig(eps=-0.1)
