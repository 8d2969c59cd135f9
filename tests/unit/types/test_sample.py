"""Parts and Samples: lineage, filling, rewards, and pieces that keep their descendants."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.types.same import assert_same_sample
from unirl.types.condition import Conditions, Embedding
from unirl.types.media import Media
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sample_id import root_id
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import CleanLatents, LatentSegment

SAMPLING = DiffusionSamplingParams(steps=4, height=8, width=8)


def prompts(count: int, rollout: int = 0) -> Part:
    ids = [root_id(rollout, row) for row in range(count)]
    media = Media(texts=[f"prompt {row}" for row in range(count)])
    return Part(ids=ids, metadata=[{"row": row} for row in range(count)], media=media)


def segment_of(count: int, steps: int = 4) -> LatentSegment:
    """Every position recorded; the latents of row i are i + position / 100."""
    rows, positions = torch.arange(count), torch.arange(steps + 1)
    return LatentSegment(
        latents=(rows[:, None] + positions / 100)[:, :, None, None].expand(count, steps + 1, 2, 3).contiguous(),
        positions=positions,
        sigmas=torch.linspace(1, 0, steps + 1),
        times=torch.linspace(1000, 1000 / steps, steps),
        sde_indices=torch.arange(steps - 1),
        log_probs=-rows[:, None] * torch.ones(steps - 1),
    )


def filled(part: Part, version: int = 3) -> Part:
    count = len(part)
    rows = torch.arange(count).float()
    positive = Embedding(tokens=rows[:, None, None].expand(count, 2, 3).contiguous(), pooled=rows[:, None].clone())
    return part.fill(
        media=Media(images=torch.rand(count, 3, 8, 8)),
        segment=segment_of(count),
        conditions=Conditions(positive=positive),
        version=version,
    )


def rewarded(part: Part, rewards: list[float]) -> Part:
    column = torch.tensor(rewards)
    return part.with_rewards(Scores(column, {"r": column}, [()] * len(part)))


def enhanced(count: int, rewrites: int, images: int) -> Sample:
    """Prompt, rewrite, image."""
    return Sample((prompts(count),)).fork(rewrites, SAMPLING).fork(images, SAMPLING)


# Part


def test_fork_makes_siblings_next_to_each_other_in_parent_order() -> None:
    part = prompts(2).fork(3, SAMPLING)
    assert part.ids == ["r0.p0/0", "r0.p0/1", "r0.p0/2", "r0.p1/0", "r0.p1/1", "r0.p1/2"]
    assert [row["row"] for row in part.metadata] == [0, 0, 0, 1, 1, 1]
    assert part.generated
    assert not part.filled


def test_prompts_are_given_and_filled() -> None:
    assert not prompts(1).generated
    assert prompts(1).filled


def test_fill_records_the_version_of_every_row() -> None:
    part = filled(prompts(2).fork(2, SAMPLING), version=7)
    assert part.version is not None
    assert part.version.dtype == torch.int64
    assert part.version.tolist() == [7, 7, 7, 7]


def test_only_an_unfilled_generated_part_can_be_filled() -> None:
    for part in (prompts(2), filled(prompts(1).fork(2, SAMPLING))):
        with pytest.raises(ValueError, match="only an unfilled generated Part can be filled"):
            filled(part)


def test_a_trajectory_of_another_length_than_asked_for_is_refused_by_both_numbers() -> None:
    """An engine that returns 14 steps for a request of 15."""
    part = prompts(1).fork(1, DiffusionSamplingParams(steps=15, height=8, width=8))
    with pytest.raises(ValueError, match="the trajectory has 14 steps, 15 were asked for"):
        part.fill(media=Media(texts=["x"]), segment=segment_of(1, steps=14), conditions=None, version=0)


def test_what_does_not_fit_the_rows_is_refused() -> None:
    part = prompts(2).fork(1, SAMPLING)
    with pytest.raises(ValueError, match="Part: fields disagree on the number of rows"):
        part.fill(media=Media(texts=["x"]), segment=None, conditions=None, version=0)
    three = torch.zeros(3)
    with pytest.raises(ValueError, match="Part: fields disagree on the number of rows"):
        part.with_rewards(Scores(three, {"r": three}, [()] * 3))


def test_an_id_may_not_stand_twice() -> None:
    with pytest.raises(ValueError, match="an id stands twice in a Part"):
        Part(ids=["r0.p0", "r0.p0"], metadata=[{}, {}])


def test_ids_of_a_part_have_one_depth() -> None:
    with pytest.raises(ValueError, match="the ids of a Part must have one depth"):
        Part(ids=["r0.p0", "r0.p1/0"], metadata=[{}, {}])


def test_a_branch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="branch must be at least 1, got 0"):
        prompts(1).fork(0, SAMPLING)


def test_rewards_come_before_advantages() -> None:
    with pytest.raises(ValueError, match="compute_advantages needs rewards: call with_rewards first"):
        prompts(1).fork(2, SAMPLING).compute_advantages()


def test_per_component_needs_components_and_weights() -> None:
    part = rewarded(prompts(1).fork(2, SAMPLING), [0, 1])
    with pytest.raises(ValueError, match="combine='per_component' needs reward components and their weights"):
        part.compute_advantages(combine="per_component")


def test_rows_without_a_finite_reward_are_invalid_and_supervised_rows_are_not() -> None:
    part = rewarded(prompts(1).fork(3, SAMPLING), [0.0, float("nan"), float("inf")])
    assert part.valid.tolist() == [True, False, False]
    given = prompts(2).with_targets(segment=CleanLatents(torch.zeros(2, 4)), conditions=conditions(2))
    assert given.valid.tolist() == [True, True]
    assert not given.generated


def conditions(count: int) -> Conditions:
    return Conditions(positive=Embedding(tokens=torch.zeros(count, 2, 3)))


def test_groups_are_siblings_or_the_descendants_of_a_prompt_or_all() -> None:
    part = enhanced(2, 2, 1).frontier
    assert part.groups("group") == ["r0.p0/0", "r0.p0/1", "r0.p1/0", "r0.p1/1"]
    assert part.groups("prompt") == ["r0.p0", "r0.p0", "r0.p1", "r0.p1"]
    assert part.groups("global") == [""] * 4


def test_parts_of_different_sampling_do_not_join() -> None:
    """Their schedules differ: 4 steps and 5."""
    other = DiffusionSamplingParams(steps=5, height=8, width=8)
    with pytest.raises(ValueError, match=r"Part\.sampling must be the same in all batches to join"):
        Part.concat([prompts(1).fork(1, SAMPLING), prompts(1, rollout=1).fork(1, other)])


def test_trajectories_over_different_sigmas_do_not_join() -> None:
    segment = segment_of(1)
    shifted = dataclasses.replace(segment, sigmas=segment.sigmas**0.5)
    with pytest.raises(ValueError, match=r"LatentSegment\.sigmas must be the same in all batches to join"):
        LatentSegment.concat([segment, shifted])


# Sample


def test_a_request_grows_at_its_frontier() -> None:
    sample = enhanced(2, 3, 2)
    assert [len(part) for part in sample.parts] == [2, 6, 12]
    assert sample.roots.ids == ["r0.p0", "r0.p1"]
    assert sample.frontier.ids[:3] == ["r0.p0/0/0", "r0.p0/0/1", "r0.p0/1/0"]
    assert sample.parent_rows().tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_roots_have_no_parent_rows() -> None:
    with pytest.raises(ValueError, match="roots, which have no parents"):
        Sample((prompts(2),)).parent_rows()


def test_the_frontier_is_replaced_by_the_same_rows() -> None:
    sample = Sample((prompts(1),)).fork(2, SAMPLING)
    done = sample.with_frontier(filled(sample.frontier))
    assert done.frontier.filled
    assert not sample.frontier.filled
    with pytest.raises(ValueError, match="the new frontier must hold the same rows in the same order"):
        sample.with_frontier(filled(sample.frontier).select([1, 0]))


def test_an_empty_lineage_is_refused() -> None:
    with pytest.raises(ValueError, match="a Sample needs at least one Part"):
        Sample(())


def test_levels_follow_each_other() -> None:
    roots, children = prompts(1), prompts(1).fork(1, SAMPLING)
    with pytest.raises(ValueError, match=r"part 0 of a Sample has ids of depth 1: 'r0\.p0/0'"):
        Sample((children,))
    with pytest.raises(ValueError, match="part 1 of a Sample has ids of depth 2"):
        Sample((roots, children.fork(1, SAMPLING)))


def test_a_child_needs_its_parent_in_the_part_above() -> None:
    stranger = prompts(1, rollout=1).fork(1, SAMPLING)
    with pytest.raises(ValueError, match=r"parents \['r1.p0'\] are not in the Part above"):
        Sample((prompts(1), stranger))


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [2, 3, 0, 1]], ids=["scattered", "swapped"])
def test_siblings_stand_together_in_the_order_of_their_parents(order: list[int]) -> None:
    children = prompts(2).fork(2, SAMPLING)
    with pytest.raises(ValueError, match="siblings must stand next to each other, in the order of their parents"):
        Sample((prompts(2), children.select(order)))


def test_a_parent_may_have_lost_its_children() -> None:
    sample = Sample((prompts(3), prompts(3).fork(2, SAMPLING).select([0, 4, 5])))
    assert sample.parent_rows().tolist() == [0, 2, 2]


@given(count=st.integers(1, 5), rewrites=st.integers(1, 3), images=st.integers(1, 3), data=st.data())
def test_joining_what_was_split_gives_the_sample_back(
    count: int, rewrites: int, images: int, data: st.DataObject
) -> None:
    sample = enhanced(count, rewrites, images)
    sample = sample.with_frontier(filled(sample.frontier))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]
    pieces = sample.split(counts)
    assert [len(piece.roots) for piece in pieces] == counts
    assert [len(piece.frontier) for piece in pieces] == [number * rewrites * images for number in counts]
    assert_same_sample(Sample.concat(pieces), sample)


def test_a_piece_carries_all_descendants_of_its_roots() -> None:
    first, second = enhanced(3, 2, 1).split([1, 2])
    assert first.frontier.ids == ["r0.p0/0/0", "r0.p0/1/0"]
    assert second.parts[1].ids == ["r0.p1/0", "r0.p1/1", "r0.p2/0", "r0.p2/1"]


def test_a_root_without_descendants_keeps_its_empty_levels_in_a_split() -> None:
    sample = Sample((prompts(2), prompts(2).fork(2, SAMPLING).select([0, 1])))
    first, second = sample.split([1, 1])
    assert [len(part) for part in second.parts] == [1, 0]
    assert_same_sample(Sample.concat([first, second]), sample)


def test_samples_of_different_depth_do_not_join() -> None:
    with pytest.raises(ValueError, match=r"cannot join Samples of \[2, 3\] Parts"):
        Sample.concat([Sample((prompts(1),)).fork(1, SAMPLING), enhanced(1, 1, 1)])


def test_a_filled_sample_survives_pickling() -> None:
    sample = enhanced(2, 2, 2)
    frontier = rewarded(filled(sample.frontier), [float(row) for row in range(8)]).compute_advantages("prompt")
    sample = sample.with_frontier(frontier)
    assert_same_sample(pickle.loads(pickle.dumps(sample)), sample)


# Rewards of parents


@pytest.mark.parametrize(("how", "expected"), [("mean", [1.5, 4.0]), ("max", [2.0, 4.0]), ("sum", [3.0, 4.0])])
def test_a_parent_is_rewarded_by_its_finite_children(how: str, expected: list[float]) -> None:
    sample = enhanced(1, 2, 2)
    sample = sample.with_frontier(rewarded(sample.frontier, [1.0, 2.0, float("nan"), 4.0]))
    upwards = sample.propagate_rewards(how)  # type: ignore[arg-type]
    assert upwards.parts[1].rewards is not None
    assert upwards.parts[1].rewards.tolist() == expected
    assert torch.equal(upwards.parts[1].valid, torch.tensor([True, True]))
    assert upwards.frontier is sample.frontier


def test_a_parent_without_a_finite_child_is_invalid() -> None:
    sample = enhanced(1, 2, 1)
    sample = sample.with_frontier(rewarded(sample.frontier, [float("nan"), 3.0]))
    parents = sample.propagate_rewards("mean").parts[1]
    assert parents.valid.tolist() == [False, True]


def test_propagation_needs_rewards_at_the_frontier() -> None:
    with pytest.raises(ValueError, match="propagate_rewards needs rewards at the frontier"):
        enhanced(1, 1, 1).propagate_rewards("mean")


def test_weights_beside_a_weighted_sum_are_refused_because_they_would_do_nothing() -> None:
    part = (
        prompts(1)
        .fork(2, SAMPLING)
        .with_rewards(
            Scores(total=torch.tensor([0.0, 1.0]), components={"r": torch.tensor([0.0, 1.0])}, failures=[(), ()])
        )
    )
    with pytest.raises(ValueError, match="weights are for combine='per_component'"):
        part.compute_advantages(weights={"r": 1.0})
