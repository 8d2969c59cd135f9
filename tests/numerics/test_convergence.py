"""Samplers on a Gaussian target with the exact velocity: which distribution they reach, and how fast.

The target is N(M, S) in two correlated dimensions. Its velocity is affine in x, and so is every transition: mean and
covariance of a sampler follow exactly, step by step, without drawing a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from unirl.sde.noise import StepNoise
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.solver import SOLVERS, History, Stepper
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import CPS, DanceSDE, FlowSDE, SDEStrategy
from unirl.sde.trajectory import sample_trajectory

M = torch.tensor([0.5, -1.0], dtype=torch.float64)
S = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64)
ONE = torch.eye(2, dtype=torch.float64)
PROBES = torch.cat([torch.zeros(1, 2, dtype=torch.float64), ONE])  # an affine map is known by its values there


def covariance(sigma: torch.Tensor) -> torch.Tensor:
    """Of x_t: `(1 - t)^2 S + t^2`, `(B, 2, 2)`."""
    level = sigma.double()[:, None, None]
    return (1 - level) ** 2 * S + level**2 * ONE


def velocity(x: torch.Tensor, step: Step, rows: torch.Tensor | None = None) -> torch.Tensor:
    """E[eps - x0 | x_t] of latents `(B, ..., 2)`, in float64."""
    sigma = step.sigma.double().reshape(-1, *[1] * (x.ndim - 1))
    centred = x.double() - (1 - sigma) * M
    gain = torch.einsum("bij,b...j->b...i", torch.linalg.inv(covariance(step.sigma)), centred)
    return sigma * gain - M - (1 - sigma) * torch.einsum("ij,b...j->b...i", S, gain)


def schedule_of(steps: int, start: float, shift: float = 1.0) -> Schedule:
    sigmas = pin(start * shift_sigmas(uniform_sigmas(steps), shift))
    return Schedule(sigmas, 1000 * sigmas[:-1])


def reached(strategy: SDEStrategy, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of x_0 when every step but the last is stochastic, from the true ones at `sigmas[0]`."""
    mean = (1 - schedule.sigmas[0].double()) * M
    spread = covariance(schedule.sigmas[:1])[0]
    for index in range(len(schedule)):
        kernel = strategy if index < len(schedule) - 1 else FlowSDE(0.0)
        step = schedule.at(torch.full((3,), index))
        mapped = kernel.mean(PROBES, velocity(PROBES, step), step)
        linear = (mapped[1:] - mapped[0]).T
        mean = linear @ mean + mapped[0]
        spread = linear @ spread @ linear.T + kernel.std(step, PROBES)[0].square() * ONE
    return mean, spread


def error_of_covariance(strategy: SDEStrategy, steps: int, start: float) -> float:
    """Largest error of the covariance; the mean must be exact, since its path `(1 - t) M` is a straight line."""
    mean, spread = reached(strategy, schedule_of(steps, start))
    torch.testing.assert_close(mean, M, rtol=0, atol=1e-12)
    return (spread - S).abs().max().item()


def order(error: Callable[[int], float], steps: int) -> float:
    """Observed order between `steps` and twice as many."""
    return math.log2(error(steps) / error(2 * steps))


@pytest.mark.parametrize("start", [1.0, 0.9])
@pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
def test_dance_reaches_the_target_at_weak_order_one(level: float, start: float) -> None:
    def error(steps: int) -> float:
        return error_of_covariance(DanceSDE(level), steps, start)

    assert order(error, 160) == pytest.approx(1.0, abs=0.05)
    assert error(320) < 5e-3


@pytest.mark.parametrize("level", [0.4, 0.7, 1.0])
def test_flow_reaches_the_target_at_weak_order_one_below_pure_noise(level: float) -> None:
    def error(steps: int) -> float:
        return error_of_covariance(FlowSDE(level), steps, 0.9)

    assert order(error, 160) == pytest.approx(1.0, abs=0.06)
    assert error(320) < 5e-3


def test_euler_reaches_the_target_at_order_one() -> None:
    assert order(lambda steps: error_of_covariance(FlowSDE(0.0), steps, 1.0), 160) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("level", [0.4, 0.7, 1.0])
def test_the_first_flow_step_inflates_the_variance_by_a_fourth_power_whatever_the_number_of_steps(level: float) -> None:
    """At sigma 1 the std is the level itself: `(1 - a^2/2)^2 + a^2 = 1 + a^4/4`. As published; not of first order."""
    step = schedule_of(20000, 1.0).at(torch.zeros(3, dtype=torch.long))
    flow = FlowSDE(level)
    mapped = flow.mean(PROBES, velocity(PROBES, step), step)
    linear = (mapped[1:] - mapped[0]).T
    spread = linear @ linear.T + flow.std(step, PROBES)[0].square() * ONE
    torch.testing.assert_close(spread, (1 + level**4 / 4) * ONE, rtol=0, atol=3e-4)


def test_flow_from_pure_noise_forgets_its_first_step_and_beats_euler_at_few_steps() -> None:
    at_ten, at_640 = (error_of_covariance(FlowSDE(0.7), steps, 1.0) for steps in (10, 640))
    assert at_ten < 0.3 * error_of_covariance(FlowSDE(0.0), 10, 1.0)
    assert at_640 < 3e-3


def test_cps_is_the_sde_of_the_target_when_its_level_falls_with_the_root_of_the_step() -> None:
    """Then the noise of a step is of the order of sqrt(dt), and the weak order is one."""

    def error(steps: int) -> float:
        return error_of_covariance(CPS(0.5 * math.sqrt(10 / steps)), steps, 1.0)

    assert order(error, 160) == pytest.approx(1.0, abs=0.05)
    assert error(320) < 7e-3


def test_cps_of_a_fixed_level_keeps_the_mean_and_contracts_the_covariance() -> None:
    """Its noise does not shrink with dt: predicted noise is replaced by fresh noise at every step, and spread is lost."""
    errors = [error_of_covariance(CPS(0.5), steps, 1.0) for steps in (80, 160, 320)]
    assert all(0.07 < error < 0.1 for error in errors)
    _, spread = reached(CPS(0.5), schedule_of(320, 1.0))
    assert (torch.linalg.eigvalsh(S - spread) > 0).all()
    # Level by level: less noise, less loss, down to Euler's own error.
    losses = [error_of_covariance(CPS(level), 320, 1.0) for level in (0.8, 0.5, 0.2, 0.05, 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 5e-3


# The drawn trajectories of the loop follow the exact recursion


@pytest.mark.parametrize("strategy", [FlowSDE(0.7), DanceSDE(0.5), CPS(0.5)], ids=["flow", "dance", "cps"])
def test_the_loop_draws_from_the_distribution_of_the_recursion(strategy: SDEStrategy) -> None:
    """12800 pairs: standard errors of 0.6 % of the covariance's diagonal; four of them are allowed."""
    ids = [f"r0.p{row}/0" for row in range(100)]
    schedule = schedule_of(12, 1.0, shift=3.0)
    segment = sample_trajectory(
        velocity,
        torch.randn(100, 128, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        schedule,
        strategy=strategy,
        solver=SOLVERS["euler"],
        sde_indices=tuple(range(11)),
        noise=StepNoise(ids, 3),
        storage_dtype=torch.float64,
    )
    drawn = segment.final.flatten(0, 1)
    mean, spread = reached(strategy, schedule)
    standard_error = (spread.diagonal() / len(drawn)).sqrt()
    assert ((drawn.mean(0) - mean).abs() < 4 * standard_error).all()
    error = (torch.cov(drawn.T, correction=0) - spread).abs() / spread.diagonal().max()
    assert error.max() < 4 * math.sqrt(2 / len(drawn))


# Solvers


def walked(solver: Stepper, sigmas: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x `(B, 2)` stepped along `sigmas` in float64."""
    history: History | None = None
    for index in range(len(sigmas) - 1):
        level, lower = (sigmas[i].expand(len(x)) for i in (index, index + 1))
        step = Step(torch.full((len(x),), index), sigma=level, sigma_next=lower, sigma_star=level, time=1000 * level)
        x, history = solver(x, velocity(x, step), step, history)
    return x


def root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.sqrt().diag() @ vectors.T


def test_euler_has_order_one_and_2m_order_two_between_the_ends_of_the_schedule() -> None:
    """The flow maps deviations by `V(t)^(1/2) V(t0)^(-1/2)`: the covariances of all times commute."""
    start, end = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    x = torch.tensor([[1.0, 0.5], [-2.0, 0.25]], dtype=torch.float64)
    flow = root(covariance(end[None])[0]) @ torch.linalg.inv(root(covariance(start[None])[0]))
    exact = (1 - end) * M + (x - (1 - start) * M) @ flow.T

    def error(solver: str, steps: int) -> float:
        sigmas = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        return (walked(SOLVERS[solver], sigmas, x) - exact).abs().max().item()

    assert order(lambda steps: error("euler", steps), 80) == pytest.approx(1.0, abs=0.05)
    assert order(lambda steps: error("dpmpp_2m", steps), 80) == pytest.approx(2.0, abs=0.1)
    assert error("dpmpp_2m", 160) < 0.01 * error("euler", 160)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_reaches_the_target_from_pure_noise(solver: str) -> None:
    """The whole schedule, through the loop: affine in x_T, so the covariance of x_0 is exact."""
    errors = []
    for steps in (40, 80, 160):
        segment = sample_trajectory(
            velocity,
            PROBES,
            schedule_of(steps, 1.0, shift=3.0),
            strategy=FlowSDE(0.0),
            solver=SOLVERS[solver],
            sde_indices=(),
            noise=StepNoise(["r0.p0/0", "r0.p0/1", "r0.p0/2"], 0),
            storage_dtype=torch.float64,
        )
        mapped = segment.final
        linear = (mapped[1:] - mapped[0]).T
        torch.testing.assert_close(mapped[0], M, rtol=0, atol=1e-6)
        errors.append((linear @ linear.T - S).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < {"euler": 0.03, "dpmpp_2m": 0.003}[solver]


def test_order_one_of_2m_and_its_end_steps_are_euler() -> None:
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    schedule = schedule_of(5, 1.0, shift=3.0)
    history: History | None = None
    for index in (0, 1, 4):
        step = schedule.at(torch.tensor([index]))
        euler, _ = SOLVERS["euler"](x, velocity(x, step), step, None)
        ours, history = SOLVERS["dpmpp_2m"](x, velocity(x, step), step, history)
        # Step 0 has no history, step 1 remembers a step from sigma 1, step 4 ends at 0.
        assert torch.equal(ours, euler)


def test_a_multistep_direction_needs_both_predictions() -> None:
    """By hand: x' = (t'/t) x - (1-t') expm1(-h) (c + (c - c_before) h / (2 h_before))."""
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    schedule = schedule_of(5, 1.0)
    before, step = (schedule.at(torch.tensor([index])) for index in (1, 2))
    _, history = SOLVERS["dpmpp_2m"](x, velocity(x, before), before, None)
    ours, _ = SOLVERS["dpmpp_2m"](x, velocity(x, step), step, history)
    assert history is not None
    t_before, t, t_next = (float(schedule.sigmas[i].double()) for i in (1, 2, 3))
    clean = x - t * velocity(x, step)
    log_snr = [math.log((1 - s) / s) for s in (t_before, t, t_next)]
    h_before, h = log_snr[1] - log_snr[0], log_snr[2] - log_snr[1]
    direction = clean + (clean - history.clean) * h / (2 * h_before)
    expected = t_next / t * x - (1 - t_next) * math.expm1(-h) * direction
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
