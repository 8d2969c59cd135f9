"""Which steps are stochastic, against MixGRPO, UniRL 0.2.0, Flow-Factory (file 42)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from unirl.sde.noise import StepNoise
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.solver import euler
from unirl.sde.steps import Schedule
from unirl.sde.strategy import DanceSDE
from unirl.sde.trajectory import sample_trajectory
from unirl.types.steps import AllSteps, FirstFraction, ListedSteps, NoSteps, RandomSteps, WindowSteps

CASES = load("42_window_schedules")
Run = tuple[int, int, list[int]]

UNIRL_WINDOWS = [case for case in CASES.values() if case.name.startswith("unirl_") and "runs" in case.outputs]
# MixGRPO's windows are full up to an iteration; from there on they shrink at the end of the schedule, or are empty.
MIX_SHRINKS_AT: dict[str, int | None] = {
    "mix_progressive_script_25steps": None,
    "mix_progressive_flash_25steps": None,
    "mix_progressive_5iters_no_overlap_rollback": 25,
    "mix_progressive_3iters_no_overlap_clip": 15,
    "mix_decay_10_1_overlap1": 116,
    "mix_exp_decay_10": None,
    "mix_exp_decay_10_threshold5_k0.2": 110,
    "mix_progressive_script_first_640_iterations": 500,
}
ALONE = (
    "mix_progressive_flash_star_stride0",
    "unirl_all_T10_fraction1.0_kNone",
    "unirl_all_T10_fraction0.99_kNone",
    "unirl_all_T10_fraction[0, 0.5]_k2",
    "unirl_all_T10_fraction0.5_k0",
    "unirl_trajectory_positions",
    "flow_factory_2_of_6",
    "mix_flash_sigmas_last_window_step3",
)
FLASH = "MixGRPO-Flash compresses the sigmas after the window, and its table "
WITHOUT_COUNTERPART = {
    "mix_flash_sigmas_last_window_step10": FLASH + "is one of a schedule per window: no such option",
    "mix_flash_sigmas_last_window_step20": FLASH + "is one of a schedule per window: no such option",
    "mix_flash_sigmas_last_window_step22": FLASH + "ends above 0: a latent that is still noisy",
}


def test_every_case_is_tested_or_listed() -> None:
    tested = [*(case.name for case in UNIRL_WINDOWS), *MIX_SHRINKS_AT, *ALONE]
    assert_covered("42_window_schedules", tested, WITHOUT_COUNTERPART)


def steps_of(runs: list[Run]) -> list[tuple[int, ...]]:
    """The steps of every iteration."""
    return [tuple(steps) for first, last, steps in runs for _ in range(first, last + 1)]


def resolved(rule: WindowSteps, num_steps: int, iterations: int) -> list[tuple[int, ...]]:
    return [rule.indices(num_steps, iteration) for iteration in range(iterations)]


@pytest.mark.parametrize("case", UNIRL_WINDOWS, ids=lambda case: case.name)
def test_unirl_windows(case: Case) -> None:
    """Its `num_timesteps` counts the stochastic steps: one less than T."""
    given = case.inputs
    decay = given["strategy"] == "decay"
    rule = WindowSteps(
        size=given["window_size"],
        move=given["strategy"],
        overlap=given["overlap_size"],
        rollouts_per_window=given["max_iters_per_window" if decay else "iters_per_window"],
        min_rollouts=given.get("min_iters_per_window", 1),
        start=given.get("init_timestep", 0),
        roll_back=given["roll_back"],
    )
    expected = steps_of(case.outputs["runs"])
    assert resolved(rule, given["num_timesteps"] + 1, len(expected)) == expected


def mix_window(given: dict[str, Any]) -> WindowSteps:
    """MixGRPO's `prog_overlap_step` is the stride; without overlap the stride is the window."""
    stride = given["prog_overlap_step"] if given["prog_overlap"] else given["group_size"]
    decay = given["sample_strategy"] == "decay"
    return WindowSteps(
        size=given["group_size"],
        move=given["sample_strategy"],
        overlap=given["group_size"] - stride,
        rollouts_per_window=given["max_iters_per_group" if decay else "iters_per_group"],
        min_rollouts=given.get("min_iters_per_group", 1),
        decay_rate=given.get("exp_decay_k", 0.1),
        decay_threshold=given.get("exp_decay_thre_timestep", 13),
        roll_back=given["roll_back"],
    )


@pytest.mark.parametrize(("name", "shrinks_at"), MIX_SHRINKS_AT.items())
def test_mix_grpo_windows_while_they_are_full(name: str, shrinks_at: int | None) -> None:
    case = CASES[name]
    given = CASES[case.inputs["see"]].inputs if "see" in case.inputs else case.inputs
    expected = steps_of(case.outputs["runs"])
    rule, num_steps = mix_window(given), given["max_timesteps"] + 1
    ours = resolved(rule, num_steps, len(expected))
    end = len(expected) if shrinks_at is None else shrinks_at
    assert ours[:end] == expected[:end]
    assert all(len(steps) == rule.size for steps in ours)
    if shrinks_at is not None:
        assert len(expected[shrinks_at]) < rule.size


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        ("mix_progressive_script_first_640_iterations", range(575, 600)),
        ("mix_progressive_3iters_no_overlap_clip", range(18, 121)),
        ("mix_decay_10_1_overlap1", range(120, 121)),
        ("mix_exp_decay_10_threshold5_k0.2", range(113, 114)),
    ],
)
def test_mix_grpo_trains_no_step_where_ours_trains_a_full_window(name: str, empty: range) -> None:
    expected = steps_of(CASES[name].outputs["runs"])
    assert [iteration for iteration, steps in enumerate(expected) if not steps] == list(empty)


def test_mix_grpo_never_trains_step_23_of_25_that_ours_does() -> None:
    """Its bound T - 2 is used as an exclusive one."""
    theirs = {
        step
        for steps in steps_of(CASES["mix_progressive_script_first_640_iterations"].outputs["runs"])
        for step in steps
    }
    assert theirs == set(range(23))
    ours = {step for steps in resolved(WindowSteps(4, overlap=3, rollouts_per_window=25), 25, 640) for step in steps}
    assert ours == set(range(24))


def test_a_window_that_never_moves_is_a_list() -> None:
    """Stride 0: an overlap of the whole window is refused, the steps are named instead."""
    case = CASES["mix_progressive_flash_star_stride0"]
    assert steps_of(case.outputs["runs"]) == [ListedSteps((0, 1, 2, 3)).indices(24, rollout) for rollout in range(121)]
    with pytest.raises(ValueError, match=r"overlap must be in \[0, size\), got overlap=4, size=4"):
        mix_window(case.inputs)


def test_unirl_fraction_one_includes_the_last_step_that_ours_leaves_deterministic() -> None:
    theirs = CASES["unirl_all_T10_fraction1.0_kNone"].outputs["indices_per_rollout"]
    assert set(map(tuple, theirs)) == {tuple(range(10))}
    assert AllSteps().indices(10, 0) == FirstFraction(1.0).indices(10, 0) == tuple(range(9))


def test_unirl_fraction_of_steps() -> None:
    theirs = CASES["unirl_all_T10_fraction0.99_kNone"].outputs["indices_per_rollout"]
    ours = [FirstFraction(0.99).indices(10, rollout) for rollout in range(len(theirs))]
    assert [tuple(steps) for steps in theirs] == ours


def test_unirl_two_random_steps_of_the_first_half_have_our_support() -> None:
    """The draws come from another generator; what can be drawn is the same: two of the first five, sorted."""
    theirs = {tuple(steps) for steps in CASES["unirl_all_T10_fraction[0, 0.5]_k2"].outputs["indices_per_rollout"]}
    rule = RandomSteps(count=2, pool=(0, 1, 2, 3, 4))
    ours = {rule.indices(10, rollout) for rollout in range(200)}
    assert ours == {(i, j) for i in range(5) for j in range(i + 1, 5)}
    assert theirs <= ours


def test_unirl_zero_random_steps_are_an_ode_rollout() -> None:
    theirs = CASES["unirl_all_T10_fraction0.5_k0"].outputs["indices_per_rollout"]
    assert {tuple(steps) for steps in theirs} == {NoSteps().indices(10, 0)}
    with pytest.raises(ValueError, match="cannot draw 0 SDE steps"):
        RandomSteps(count=0).indices(10, 0)


def test_flow_factory_two_of_six_have_our_support() -> None:
    """torch's randperm keeps its order; ours are sorted, as everything that walks a trajectory needs."""
    case = CASES["flow_factory_2_of_6"]
    pool = tuple(case.raw("sde_steps"))
    ours = {RandomSteps(count=2, pool=pool).indices(10, rollout) for rollout in range(300)}
    assert {tuple(sorted(steps)) for steps in case.outputs["steps_per_seed"]} <= ours
    assert len(ours) == 15


def test_recorded_positions_are_the_ends_of_every_stochastic_step_and_the_final_latent() -> None:
    case = CASES["unirl_trajectory_positions"]
    sigmas = pin(uniform_sigmas(case.raw("num_steps")))
    for indices, positions in zip(case.raw("sde_indices"), case.outputs["positions"], strict=True):
        if 9 in indices:
            with pytest.raises(ValueError, match="SDE step 9 is the last of 10 steps"):
                ListedSteps(tuple(indices)).indices(10, 0)
            indices, positions = [0, 4], [0, 1, 4, 5]
        segment = sample_trajectory(
            lambda x, step, rows: x,
            torch.ones(1, 4),
            Schedule(sigmas, 1000 * sigmas[:-1]),
            strategy=DanceSDE(0.3),
            solver=euler,
            sde_indices=indices,
            noise=StepNoise(["r0.p0/0"], 0),
            storage_dtype=torch.float32,
        )
        assert segment.positions.tolist() == [*positions, 10]


def test_mix_grpo_flash_keeps_the_table_up_to_its_window_and_ours_to_the_end() -> None:
    """Up to one step after the window both are the single-shifted table; then Flash skips, ours does not."""
    case = CASES["mix_flash_sigmas_last_window_step3"]
    ours = pin(shift_sigmas(uniform_sigmas(case.raw("sampling_steps")), case.raw("shift"))).double()
    theirs = case.output("sigmas")
    torch.testing.assert_close(ours[:5], theirs[:5], rtol=0, atol=1.3e-7)
    assert len(theirs) == 12
    assert len(ours) == 26
    assert ours[-1] == theirs[-1] == 0
    assert CASES["mix_flash_sigmas_last_window_step22"].output("sigmas")[-1] > 0.2
