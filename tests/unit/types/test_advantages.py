"""What group_relative, combine_rewards and gae refuse, and their smallest cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.types.advantages import Scale, combine_rewards, gae, group_numbers, group_relative, spread_of


def test_the_documented_example() -> None:
    ours = group_relative(torch.tensor([1.0, 3, 5, 5]), ["a", "a", "b", "b"], scale="group_std")
    assert ours.tolist() == pytest.approx([-1, 1, 0, 0], abs=2e-6)
    assert ours.dtype == torch.float32


def one_group_after_another(rewards: torch.Tensor, groups: list[str], scale: str, eps: float) -> torch.Tensor:
    """The definition, a group at a time."""
    values, names = rewards.double(), torch.tensor([groups.index(group) for group in groups])
    finite = torch.isfinite(values)
    everything = values[finite].std(correction=0) if finite.any() else torch.zeros(())
    advantages = torch.zeros(len(values), dtype=torch.float64)
    for number in names.unique():
        rows = ((names == number) & finite).nonzero().flatten()
        if len(values[rows].unique()) > 1:
            std = {"group_std": values[rows].std(correction=0), "global_std": everything, "none": 1 - eps}[scale]
            advantages[rows] = (values[rows] - values[rows].mean()) / (std + eps)
    return advantages.float()


REWARDS = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([0.0, 1.0, float("nan"), float("inf")]))


@given(rows=st.lists(st.tuples(st.sampled_from("abcd"), REWARDS), min_size=1, max_size=40))
@pytest.mark.parametrize("scale", ["group_std", "global_std", "none"])
def test_all_groups_at_once_are_bit_for_bit_one_group_after_another(
    scale: Scale, rows: list[tuple[str, float]]
) -> None:
    groups, rewards = [group for group, _ in rows], torch.tensor([reward for _, reward in rows])
    ours = group_relative(rewards, groups, scale=scale, eps=1e-4)
    assert torch.equal(ours, one_group_after_another(rewards, groups, scale, 1e-4))


def test_the_spread_of_groups_by_hand() -> None:
    """Groups `1, 3`, `7`, `nan`."""
    spread = spread_of(torch.tensor([1.0, 7, 3, torch.nan]), group_numbers(["a", "b", "a", "c"]))
    assert spread.count.tolist() == [2, 1, 0]
    assert spread.mean.tolist() == [2, 7, 0]
    assert spread.std.tolist() == [1, 0, 0]
    assert spread.differ.tolist() == [True, False, False]


def test_rows_of_a_group_need_not_stand_together() -> None:
    ours = group_relative(torch.tensor([1.0, 5, 3, 5]), ["a", "b", "a", "b"], scale="group_std", eps=0.0)
    assert ours.tolist() == [-1, 0, 1, 0]


@pytest.mark.parametrize("rewards", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(())], ids=str)
def test_rewards_must_fit_the_group_names(rewards: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="do not fit 2 group names"):
        group_relative(rewards, ["a", "b"], scale="none")


def test_no_rewards_give_no_advantages() -> None:
    assert group_relative(torch.zeros(0), [], scale="global_std").shape == (0,)


def test_rewards_carry_no_gradient_into_the_advantages() -> None:
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_relative(rewards, ["a", "a"], scale="group_std").requires_grad


def test_a_sum_of_rewards_is_taken_in_float64() -> None:
    """1e8 + 1 - 1e8 would be 0 in float32."""
    parts = {"a": torch.tensor([1e8]), "b": torch.tensor([1.0]), "c": torch.tensor([-1e8])}
    assert combine_rewards(parts, {"a": 1.0, "b": 1.0, "c": 1.0}).tolist() == [1.0]


def test_all_weights_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"all reward weights are 0: \{'a': 0\.0\}"):
        combine_rewards({"a": torch.ones(2)}, {"a": 0.0})


def test_gae_of_two_tokens_by_hand() -> None:
    """delta_1 = 1 - 0.5, delta_0 = 0 + 0.9 * 0.5 - 0.25; A_0 = delta_0 + 0.9 * 0.8 * A_1."""
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0, 7.0]]),
        torch.tensor([[0.25, 0.5, 3.0]]),
        torch.tensor([[True, True, False]]),
        gamma=0.9,
        lam=0.8,
    )
    assert advantages.tolist()[0] == pytest.approx([0.2 + 0.72 * 0.5, 0.5, 0.0])
    assert returns.tolist()[0] == pytest.approx([0.81, 1.0, 0.0])


@pytest.mark.parametrize("shape", [(2, 3), (6,)])
def test_gae_shapes_must_agree(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        gae(torch.zeros(shape), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), gamma=1.0, lam=1.0)
