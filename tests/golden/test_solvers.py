"""Deterministic steppers along an analytic flow, against diffusers, UniRL 0.2.0, DiffusionNFT and MixGRPO (file 45)."""

from __future__ import annotations

import pytest
import torch

from tests.golden.golden import assert_covered, load
from unirl.sde.noise import StepNoise
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.solver import SOLVERS, History, Stepper
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import FlowSDE
from unirl.sde.trajectory import sample_trajectory

CASES = load("45_ode_solvers")
SHARED = next(iter(CASES.values()))
OURS = {
    "euler_diffusers": "euler",
    "euler_unirl_flow_eta0": "euler",
    "dpmpp_1_nft": "euler",  # DPM-Solver++ of order 1 (DDIM) and Euler on the flow ODE are one map
    "dpmpp_2m_nft": "dpmpp_2m",
    "dpmpp_2m_mix_midpoint": "dpmpp_2m",
    "dpmpp_2m_diffusers_midpoint": "dpmpp_2m",
}
WITHOUT_COUNTERPART = {
    "dpmpp_2m_mix_heun": "the Heun variant of 2M",
    "unipc2_bh2_unirl": "UniPC",
    "unipc2_bh1_unirl": "UniPC",
}


def test_every_case_is_tested_or_listed() -> None:
    assert_covered("45_ode_solvers", OURS, WITHOUT_COUNTERPART)


def velocity(x: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
    """E[eps - x0 | x] for x0 ~ N(mean, std^2) of each element."""
    mean, std, sigma = SHARED.input("mean"), SHARED.input("std"), step.sigma.double()[:, None]
    gain = (x - (1 - sigma) * mean) / ((1 - sigma) ** 2 * std**2 + sigma**2)
    return sigma * gain - mean - (1 - sigma) * std**2 * gain


def table(steps: int) -> Schedule:
    sigmas = pin(shift_sigmas(uniform_sigmas(steps), 3.0))
    return Schedule(sigmas, 1000 * sigmas[:-1])


def walk(solver: Stepper, schedule: Schedule) -> torch.Tensor:
    """The states `(T + 1, 6)` of one sample."""
    x, history = SHARED.input("x_1")[None], None
    states = [x]
    for index in range(len(schedule)):
        step = schedule.at(torch.tensor([index]))
        x, history = solver(x, velocity(x, step, torch.tensor([0])), step, history)
        states.append(x)
    return torch.cat(states)


def test_the_schedule_is_the_authors() -> None:
    torch.testing.assert_close(table(10).sigmas.double(), SHARED.input("sigmas_T10"), rtol=0, atol=1.3e-7)


@pytest.mark.parametrize(("name", "solver"), OURS.items())
def test_trajectory_of_ten_steps(name: str, solver: str) -> None:
    sigmas = SHARED.input("sigmas_T10", torch.float32)
    trajectory = walk(SOLVERS[solver], Schedule(sigmas, 1000 * sigmas[:-1]))
    torch.testing.assert_close(trajectory, CASES[name].output("trajectory"), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "solver"), OURS.items())
def test_errors_at_10_20_40_and_80_steps(name: str, solver: str) -> None:
    """Our tables differ from the authors' float32 ones by an ulp, hence the tolerance."""
    finals = [walk(SOLVERS[solver], table(steps))[-1] for steps in (10, 20, 40, 80)]
    torch.testing.assert_close(finals[-1], CASES[name].output("final_80"), rtol=0, atol=1e-6)
    errors = torch.stack([(final - SHARED.input("exact_x_0")).abs().max() for final in finals])
    torch.testing.assert_close(errors, CASES[name].output("max_abs_error_at_10_20_40_80_steps"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_the_loop_walks_what_the_stepper_walks(solver: str) -> None:
    schedule = table(10)
    segment = sample_trajectory(
        velocity,
        SHARED.input("x_1")[None],
        schedule,
        strategy=FlowSDE(0.0),
        solver=SOLVERS[solver],
        sde_indices=(),
        noise=StepNoise(["r0.p0/0"], 0),
        storage_dtype=torch.float64,
    )
    assert torch.equal(segment.final[0], walk(SOLVERS[solver], schedule)[-1])
    assert segment.log_probs.shape == (1, 0)


def test_two_m_is_another_map_than_heun_and_unipc() -> None:
    ours = walk(SOLVERS["dpmpp_2m"], table(10))
    for name in WITHOUT_COUNTERPART:
        assert (ours - CASES[name].output("trajectory")).abs().max() > 1e-3


def test_a_multistep_solver_remembers_its_last_prediction() -> None:
    schedule, x = table(10), SHARED.input("x_1")[None]
    step = schedule.at(torch.tensor([3]))
    _, history = SOLVERS["dpmpp_2m"](x, velocity(x, step, torch.tensor([0])), step, None)
    assert isinstance(history, History)
    torch.testing.assert_close(history.clean, x - step.sigma.double() * velocity(x, step, torch.tensor([0])))
    assert torch.equal(history.sigma, step.sigma)
