"""Advantages: the numbers of worked cases, and what must not change them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.trainer.rl import reward_metrics
from unirl.types.advantages import Scale, combine_rewards, group_relative
from unirl.types.media import Media
from unirl.types.metric import values
from unirl.types.reward import Scores
from unirl.types.sample import Part
from unirl.types.sample_id import child_id, root_id

NAN, INF = math.nan, math.inf
SCALES: tuple[Scale, ...] = ("group_std", "global_std", "none")


def relative(rewards: list[float], groups: str, scale: Scale = "group_std", eps: float = 0.0) -> list[float]:
    """Group names are single letters."""
    return group_relative(torch.tensor(rewards, dtype=torch.float64), list(groups), scale=scale, eps=eps).tolist()


def scored(ids: list[str], components: dict[str, list[float]], weights: dict[str, float]) -> Part:
    columns = {name: torch.tensor(column) for name, column in components.items()}
    total = combine_rewards(columns, weights).float()
    return Part(ids=ids, metadata=[{} for _ in ids]).with_rewards(Scores(total, columns, [()] * len(ids)))


def siblings(*group_sizes: int) -> list[str]:
    return [child_id(root_id(0, row), j) for row, size in enumerate(group_sizes) for j in range(size)]


def advantages(part: Part) -> list[float]:
    assert part.advantages is not None
    assert part.advantages.dtype == torch.float32
    return part.advantages.tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, NAN, 3], [-1, 0, 1]),
        ([1], [0]),
        ([NAN, 5, NAN], [0, 0, 0]),
        ([INF, 0, 2], [0, -1, 1]),
        ([-INF, 0, 2], [0, -1, 1]),
        ([NAN, NAN], [0, 0]),
        ([4, 4, 4], [0, 0, 0]),
    ],
    ids=str,
)
def test_non_finite_rewards_leave_the_statistics_and_get_zero(rewards: list[float], expected: list[float]) -> None:
    assert relative(rewards, "g" * len(rewards)) == expected


def test_std_is_the_population_std() -> None:
    """Sample std would give +-0.7071068, a std of 1 by mistake +-0.5."""
    assert relative([0, 1], "gg") == [-1, 1]


def test_eps_is_added_to_the_std_and_not_to_the_variance() -> None:
    """Deviation and std 1e-3, eps 1e-4: 0.9090909; `sqrt(var + eps)` would give 0.0995037."""
    assert relative([0, 2e-3], "gg", eps=1e-4) == pytest.approx([-0.9090909, 0.9090909], abs=1e-7)


def test_a_singleton_group_has_advantage_zero_and_not_its_raw_score() -> None:
    assert relative([7, 1, 3], "abb") == [0, -1, 1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 23.7, 1e-30, 1e30])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 12, 24])
def test_equal_rewards_are_exactly_zero(size: int, value: float, scale: Scale) -> None:
    """Also beside another group, and from float32, where a mean may be off by an ulp."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([value] * size + [0.0, 1.0], dtype=dtype)
        ours = group_relative(rewards, ["a"] * size + ["b", "b"], scale=scale, eps=1e-8)
        assert ours[:size].tolist() == [0.0] * size
        assert ours[-1] > 0


def test_a_row_drawn_twice_is_two_groups_though_its_text_is_one() -> None:
    """Merged by text they would give [-1.1358, -0.7863, 0.6116, 1.3106]."""
    prompts = Part(ids=[root_id(0, 0), root_id(0, 1)], metadata=[{}, {}], media=Media(texts=["a cat", "a cat"]))
    ids = [child_id(prompt, j) for prompt in prompts.ids for j in range(2)]
    part = scored(ids, {"r": [0, 2, 10, 14]}, {"r": 1.0}).compute_advantages(eps=0.0)
    assert advantages(part) == [-1, 1, -1, 1]
    assert len(set(part.groups("group"))) == 2
    merged = group_relative(torch.tensor([0.0, 2, 10, 14]), ["a cat"] * 4, scale="group_std", eps=0.0)
    assert merged.tolist() == pytest.approx([-1.1358, -0.7863, 0.6116, 1.3106], abs=1e-4)


# Several rewards

FIRST, SECOND = [0.0, 1.0, 1.0, 0.0], [4.0, 0.0, 2.0, 2.0]
WEIGHTS = {"first": 1.0, "second": 0.5}


def test_the_weighted_sum_is_normalised_or_each_reward_is() -> None:
    part = scored(siblings(4), {"first": FIRST, "second": SECOND}, WEIGHTS)
    summed = part.compute_advantages(eps=0.0)
    assert advantages(summed) == pytest.approx([1, -1, 1, -1])
    each = part.compute_advantages(combine="per_component", weights=WEIGHTS, eps=0.0)
    assert advantages(each) == pytest.approx([-0.2928932, 0.2928932, 1, -1], abs=1e-7)


def test_weights_must_name_the_rewards() -> None:
    part = scored(siblings(4), {"first": FIRST, "second": SECOND}, WEIGHTS)
    with pytest.raises(ValueError, match=r"weights \['first', 'second', 'third'\] do not name the reward components"):
        part.compute_advantages(combine="per_component", weights={**WEIGHTS, "third": 1.0})
    with pytest.raises(ValueError, match=r"weights \['first'\] do not name the reward components"):
        combine_rewards({"first": torch.tensor(FIRST), "second": torch.tensor(SECOND)}, {"first": 1.0})


def test_a_reward_of_weight_zero_has_no_influence_even_where_it_is_missing() -> None:
    components = {"first": FIRST, "second": [NAN, 0.0, 2.0, 2.0]}
    part = scored(siblings(4), components, {"first": 1.0, "second": 0.0})
    assert part.valid.all()
    expected = relative(FIRST, "gggg")
    assert advantages(part.compute_advantages(eps=0.0)) == expected
    weights = {"first": 1.0, "second": 0.0}
    assert advantages(part.compute_advantages(combine="per_component", weights=weights, eps=0.0)) == expected


@pytest.mark.parametrize("combine", ["weighted_sum", "per_component"])
def test_one_missing_component_makes_one_sample_invalid_and_no_other(combine: str) -> None:
    """The others are normalised without it: [1, 2, 1] and [., 0, 2, 2]."""
    part = scored(siblings(4), {"first": FIRST, "second": [NAN, *SECOND[1:]]}, WEIGHTS)
    assert part.valid.tolist() == [False, True, True, True]
    if combine == "weighted_sum":
        ours = part.compute_advantages(eps=0.0)
        assert advantages(ours) == pytest.approx([0, -math.sqrt(0.5), math.sqrt(2), -math.sqrt(0.5)])
    else:
        ours = part.compute_advantages(combine="per_component", weights=WEIGHTS, eps=0.0)
        low, high = math.sqrt(2), math.sqrt(0.5)
        assert advantages(ours) == pytest.approx([0, high - low / 2, high + high / 2, -low + high / 2])


# Which std, which group


def test_the_mean_of_the_group_with_the_std_of_all() -> None:
    expected = [-0.0842900, 0.0842900, -0.3371598, 0.3371598]
    assert relative([0, 1, 10, 14], "aabb", "global_std") == pytest.approx(expected, abs=1e-7)


def test_a_part_that_was_split_inside_a_group_has_the_statistics_of_the_whole() -> None:
    whole = scored(siblings(2, 2), {"r": [0, 1, 10, 14]}, {"r": 1.0})
    joined = Part.concat(whole.split([1, 3]))
    for scale in SCALES:
        assert advantages(joined.compute_advantages(scale=scale)) == advantages(whole.compute_advantages(scale=scale))


def test_images_are_compared_among_their_rewrite_or_among_their_prompt() -> None:
    ids = [child_id(child_id(root_id(0, 0), rewrite), image) for rewrite in range(2) for image in range(2)]
    part = scored(ids, {"r": [1, 2, 3, 4]}, {"r": 1.0})
    assert advantages(part.compute_advantages("group", eps=0.0)) == pytest.approx([-1, 1, -1, 1])
    by_prompt = advantages(part.compute_advantages("prompt", eps=0.0))
    assert by_prompt == pytest.approx([-1.3416408, -0.4472136, 0.4472136, 1.3416408], abs=1e-7)
    assert advantages(part.compute_advantages("global", eps=0.0)) == pytest.approx(by_prompt)


def test_spread_within_groups_and_spread_of_all_rewards_have_names_of_their_own() -> None:
    part = scored(siblings(2, 2), {"r": [0, 1, 10, 11]}, {"r": 1.0}).compute_advantages()
    figures = values(reward_metrics(part))
    assert figures["reward/group_std"] == pytest.approx(0.5)
    assert figures["reward/std"] == pytest.approx(5.0249378, abs=1e-7)
    assert figures["reward/mean"] == figures["reward/r"] == 5.5
    assert figures["reward/invalid"] == 0


def test_invalid_rewards_and_constant_groups_are_counted() -> None:
    part = scored(siblings(2, 2, 2), {"r": [0, NAN, 3, 3, 1, 2]}, {"r": 1.0}).compute_advantages()
    figures = values(reward_metrics(part))
    assert figures["reward/invalid"] == 1
    assert figures["advantage/constant_groups"] == pytest.approx(2 / 3)
    assert figures["reward/mean"] == pytest.approx(9 / 5)


def test_groups_of_identical_samples_show_in_the_metrics() -> None:
    """An engine that ignores its seeds: every group is constant, and nothing is learned."""
    part = scored(siblings(4, 4), {"r": [2, 2, 2, 2, 5, 5, 5, 5]}, {"r": 1.0}).compute_advantages()
    assert values(reward_metrics(part))["advantage/constant_groups"] == 1.0


# Invariances

GROUPED = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(-100, 100, width=32) | st.sampled_from([NAN, INF])), min_size=1
)


@given(rows=GROUPED, scale=st.sampled_from(SCALES), data=st.data())
def test_the_order_of_rows_does_not_matter(rows: list[tuple[str, float]], scale: Scale, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    groups, rewards = [group for group, _ in rows], torch.tensor([reward for _, reward in rows])
    ours = group_relative(rewards, groups, scale=scale)
    shuffled = group_relative(rewards[order], [groups[row] for row in order], scale=scale)
    torch.testing.assert_close(shuffled, ours[order], rtol=1e-6, atol=1e-6)


@given(rows=GROUPED, scale=st.sampled_from(SCALES), shift=st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_does_not_matter(
    rows: list[tuple[str, float]], scale: Scale, shift: int
) -> None:
    groups = [group for group, _ in rows]
    # Multiples of 1/64, so that the shifted rewards are exact.
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    rewards = torch.where(torch.isfinite(rewards), (rewards * 64).round() / 64, rewards)
    ours = group_relative(rewards, groups, scale=scale)
    torch.testing.assert_close(group_relative(rewards + shift, groups, scale=scale), ours, rtol=1e-6, atol=1e-6)


@given(rows=GROUPED, factor=st.floats(0.1, 100))
def test_the_unit_of_the_reward_does_not_matter(rows: list[tuple[str, float]], factor: float) -> None:
    groups, rewards = [group for group, _ in rows], torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    rewards = torch.where(torch.isfinite(rewards), (rewards * 64).round() / 64, rewards)
    for scale in ("group_std", "global_std"):
        ours = group_relative(rewards, groups, scale=scale, eps=0.0)
        torch.testing.assert_close(group_relative(rewards * factor, groups, scale=scale, eps=0.0), ours)


@given(rows=GROUPED, scale=st.sampled_from(SCALES))
def test_a_group_has_mean_zero_and_with_its_own_std_variance_one(rows: list[tuple[str, float]], scale: Scale) -> None:
    groups, rewards = [group for group, _ in rows], torch.tensor([reward for _, reward in rows])
    ours = group_relative(rewards, groups, scale=scale, eps=0.0).double()
    assert torch.isfinite(ours).all()
    for group in set(groups):
        members = torch.tensor([own == group for own in groups]) & torch.isfinite(rewards)
        assert abs(float(ours[members].sum())) < 1e-3
        if scale == "group_std" and ours[members].any():
            assert float(ours[members].square().mean()) == pytest.approx(1.0, abs=1e-5)
    assert (ours[~torch.isfinite(rewards)] == 0).all()


@given(rows=GROUPED, other=st.floats(-100, 100))
def test_a_group_does_not_feel_the_others(rows: list[tuple[str, float]], other: float) -> None:
    groups, rewards = [group for group, _ in rows], torch.tensor([reward for _, reward in rows])
    for scale in ("group_std", "none"):
        ours = group_relative(rewards, groups, scale=scale)
        beside = torch.cat([rewards, torch.tensor([other, 2 * other + 1])])
        assert torch.equal(group_relative(beside, [*groups, "z", "z"], scale=scale)[: len(rows)], ours)


def test_a_part_is_not_changed_by_its_advantages() -> None:
    part = scored(siblings(2), {"r": [0, 1]}, {"r": 1.0})
    before = dataclasses.replace(part)
    part.compute_advantages()
    assert part.advantages is None
    assert part.rewards is before.rewards
