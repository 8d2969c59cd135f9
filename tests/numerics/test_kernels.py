"""One transition: closed forms of the kernels, their density, and noise level 0."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.sde.schedule import pin, shift_sigmas, twice_shifted_sigmas, uniform_sigmas
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import CPS, STRATEGIES, CPSUnnormalised, DanceSDE, FlowSDE, SDEStrategy, euler_step, gaussian_kl

DENSITIES: dict[str, type[SDEStrategy]] = {"flow": FlowSDE, "dance": DanceSDE, "cps": CPS}


def table(*sigmas: float) -> Schedule:
    pinned = torch.tensor(sigmas, dtype=torch.float32)
    return Schedule(pinned, 1000 * pinned[:-1])


def step_between(sigma: float, sigma_next: float, dtype: torch.dtype = torch.float64) -> Step:
    """A step of one row that does not start from pure noise."""
    level, lower = torch.tensor([sigma], dtype=dtype), torch.tensor([sigma_next], dtype=dtype)
    return Step(index=torch.tensor([1]), sigma=level, sigma_next=lower, sigma_star=level, time=1000 * level)


# The worked case of the field: x = [0.5, -1], v = [0.2, 0.4], from t = 0.8 to 0.6 at level 0.7.
X = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
V = torch.tensor([[0.2, 0.4]], dtype=torch.float64)
SCORED = torch.tensor([[0.4277, -0.6546]], dtype=torch.float64)
BASE = step_between(0.8, 0.6)


def test_flow_of_the_worked_case() -> None:
    flow = FlowSDE(0.7)
    mean, std = flow.mean(X, V, BASE), flow.std(BASE, X)
    assert mean.tolist()[0] == pytest.approx([0.3277, -0.8546], abs=1e-12)
    assert std.item() == pytest.approx(0.6260990337, abs=1e-10)
    per_element = [flow.log_prob(SCORED[:, i : i + 1], mean[:, i : i + 1], std).item() for i in range(2)]
    assert per_element == pytest.approx([-0.4634469156, -0.5017122218], abs=1e-9)
    assert flow.log_prob(SCORED, mean, std).item() == pytest.approx(-0.4825795687, abs=1e-9)


def test_log_prob_is_a_mean_so_it_does_not_depend_on_the_size_of_the_latent() -> None:
    """A sum would go from -0.9651591 to -3.8606365 when the same latent is tiled four times."""
    flow = FlowSDE(0.7)
    mean, std = flow.mean(X, V, BASE), flow.std(BASE, X)
    tiled = flow.log_prob(SCORED.repeat(1, 4), mean.repeat(1, 4), std)
    assert tiled.item() == pytest.approx(-0.4825795687, abs=1e-9)


@pytest.mark.parametrize("shape", [(3,), (4, 5), (4, 2, 2), (4, 3, 2, 2)], ids=["vector", "packed", "image", "video"])
def test_log_prob_is_one_number_a_row_for_latents_of_any_rank(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, v, noise = torch.randn(3, 2, *shape)
    step = table(1.0, 0.8, 0.5, 0.0).at(torch.tensor([0, 1]))
    for strategy in (FlowSDE(0.7), DanceSDE(0.3), CPS(0.8)):
        mean, std = strategy.mean(x, v, step), strategy.std(step, x)
        assert std.shape == (2, *[1] * len(shape))
        together = strategy.log_prob(strategy.draw(mean, std, noise), mean, std)
        assert together.shape == (2,)
        alone = [strategy.log_prob((mean + std * noise)[i : i + 1], mean[i : i + 1], std[i : i + 1]) for i in range(2)]
        assert torch.equal(together, torch.cat(alone))
        assert together[0] != together[1]


@pytest.mark.parametrize("name", DENSITIES)
@given(
    sigma=st.floats(0.05, 0.99), fraction=st.floats(0.05, 0.95), level=st.floats(0.05, 1.0), seed=st.integers(0, 2**31)
)
def test_log_prob_is_that_of_torch_distributions(
    name: str, sigma: float, fraction: float, level: float, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    x, v, x_next = torch.randn(3, 1, 2, 3, generator=source, dtype=torch.float64)
    strategy, step = DENSITIES[name](level), step_between(sigma, fraction * sigma)
    mean, std = strategy.mean(x, v, step), strategy.std(step, x)
    expected = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(x_next).flatten(1).mean(1)
    torch.testing.assert_close(strategy.log_prob(x_next, mean, std), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DENSITIES)
def test_density_integrates_to_one(name: str) -> None:
    strategy = DENSITIES[name](0.6)
    mean, std = strategy.mean(X[:, :1], V[:, :1], BASE), strategy.std(BASE, X)
    grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)[:, None]
    density = strategy.log_prob(grid, mean.expand_as(grid), std.expand_as(grid)).exp()
    assert torch.trapezoid(density, grid[:, 0]).item() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("steps", [1, 2, 7, 25])
def test_level_zero_is_euler_bit_for_bit_at_every_step(name: str, steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(steps)
    for sigmas in (shift_sigmas(uniform_sigmas(steps), 3.0), twice_shifted_sigmas(steps, 3.0)):
        pinned = pin(sigmas)
        step = Schedule(pinned, 1000 * pinned[:-1]).at(torch.arange(steps))
        x, v, noise = torch.randn(3, steps, 4, 2).to(dtype)
        strategy = STRATEGIES[name](0.0)
        mean, std = strategy.mean(x, v, step), strategy.std(step, x)
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        dt = pinned[1:].to(kept) - pinned[:-1].to(kept)
        euler = x.to(kept) + v.to(kept) * dt[:, None, None]
        assert torch.equal(strategy.draw(mean, std, noise), euler)
        assert torch.equal(euler_step(x, v, step), euler)
        assert (std == 0).all()


def test_level_zero_of_the_worked_case() -> None:
    drawn = FlowSDE(0.0).mean(X, V, BASE)
    assert drawn.tolist()[0] == pytest.approx([0.46, -1.08], abs=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_small_level_tends_to_euler(name: str) -> None:
    strategy = STRATEGIES[name](1e-5)
    difference = strategy.mean(X, V, BASE) - euler_step(X, V, BASE)
    assert difference.abs().max() < 1e-9
    assert strategy.std(BASE, X).item() < 2e-5


# One std for sampling, scoring and KL


@pytest.mark.parametrize(
    ("strategy", "std", "kl"),
    [(FlowSDE(0.7), 0.7, 0.0102041), (DanceSDE(0.7), 0.3130495, 0.0510204), (CPS(0.7), 0.7128052, 0.0098408)],
    ids=["flow", "dance", "cps"],
)
def test_std_and_kl_at_the_first_step(strategy: SDEStrategy, std: float, kl: float) -> None:
    """Flow's std at sigma 1 is the level itself (a clamp of sigma to 0.99 would make it 3.13)."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    ours = strategy.std(table(1.0, 0.8, 0.5, 0.0).at(torch.tensor([0])), x)
    assert ours.item() == pytest.approx(std, abs=1e-7)
    assert gaussian_kl(x + 0.1, x, ours).item() == pytest.approx(kl, abs=1e-7)


@pytest.mark.parametrize("first", [1.0, 0.99999994, 0.999999, 0.99967])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flow_does_not_jump_just_below_sigma_one(first: float, dtype: torch.dtype) -> None:
    """float32's neighbour of 1, and where UniPC's and DPM-Solver's tables start: by the formula 1282, 313 and 17."""
    step = table(first, 0.8, 0.5, 0.0).at(torch.tensor([0]))
    x, v = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    flow = FlowSDE(0.7)
    mean, std = flow.mean(x, v, step), flow.std(step, x)
    assert std.item() == pytest.approx(0.7, rel=1e-3)
    assert torch.isfinite(mean).all()
    assert torch.isfinite(flow.log_prob(x, mean, std)).all()


def test_flow_std_inside_the_schedule_follows_its_formula() -> None:
    """No clamp at 0.99, or anywhere: `a sqrt(t / (1 - t)) sqrt(-dt)`."""
    for sigma in (0.999, 0.995, 0.99, 0.9, 0.5, 0.01):
        expected = 0.7 * math.sqrt(sigma / (1 - sigma)) * math.sqrt(sigma / 2)
        step = step_between(sigma, sigma / 2)
        assert FlowSDE(0.7).std(step, X).item() == pytest.approx(expected, rel=1e-12)


# Precision


def test_half_precision_of_the_model_does_not_enter_the_maths() -> None:
    """std 0.6260990 (0.625 in bfloat16), the mean and the density in float32."""
    flow, step = FlowSDE(0.7), step_between(0.8, 0.6, torch.float32)
    x, v = X.to(torch.bfloat16), V.to(torch.bfloat16)
    mean, std = flow.mean(x, v, step), flow.std(step, x)
    assert mean.dtype == std.dtype == torch.float32
    assert std.item() == pytest.approx(0.6260990, abs=1e-7)
    exact = flow.mean(x.double(), v.double(), BASE)
    torch.testing.assert_close(mean.double(), exact, rtol=2e-7, atol=1e-7)
    assert flow.log_prob(SCORED.to(torch.bfloat16), mean, std).dtype == torch.float32


def test_a_log_ratio_of_a_thousandth_survives_where_bfloat16_would_lose_it() -> None:
    """-1.001 against -1.000 is a ratio of 0.9990005; in bfloat16 both are -1 and the ratio is 1."""
    flow, step = FlowSDE(0.7), step_between(0.8, 0.6, torch.float32)
    std = flow.std(step, X.float())
    # Residuals whose mean log-densities are -1.000 and -1.001.
    constant = -std.log().item() - 0.5 * math.log(2 * math.pi)
    mean = torch.zeros(1, 2)
    old, new = (math.sqrt(2 * std.item() ** 2 * (constant + target)) for target in (1.000, 1.001))
    ratio = (flow.log_prob(mean + new, mean, std) - flow.log_prob(mean + old, mean, std)).exp()
    assert ratio.item() == pytest.approx(0.9990005, abs=1e-6)
    assert torch.tensor(-1.001).to(torch.bfloat16) == torch.tensor(-1.000).to(torch.bfloat16)


# Cps


def test_cps_log_ratio_is_a_difference_of_gaussians() -> None:
    """3.149; minus the squared residual alone, as published, gives 0.05, which no clip range catches."""
    step = step_between(0.5, 0.1)
    x_next, old, new = (torch.tensor([[value]], dtype=torch.float64) for value in (0.3, 0.0, 0.1))
    std = CPS(0.7).std(step, x_next)
    assert std.item() == pytest.approx(0.0891007, abs=1e-7)
    ratio = CPS(0.7).log_prob(x_next, new, std) - CPS(0.7).log_prob(x_next, old, std)
    assert ratio.item() == pytest.approx(3.1490405, abs=1e-6)
    published = CPSUnnormalised(0.7)
    assert (published.log_prob(x_next, new, std) - published.log_prob(x_next, old, std)).item() == pytest.approx(0.05)


@given(sigma=st.floats(0.05, 1.0), fraction=st.floats(0.0, 0.99), level=st.floats(0.0, 1.0))
def test_cps_preserves_the_coefficients(sigma: float, fraction: float, level: float) -> None:
    """Clean part weighted 1 - sigma', noise of total power sigma'^2, at every level up to 1."""
    step, cps = step_between(sigma, fraction * sigma), CPS(level)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    # x0 = 1, eps = 0: x = 1 - sigma, v = -1. Then x0 = 0, eps = 1: x = sigma, v = 1.
    clean = cps.mean((1 - sigma) * one, -one, step)
    noise = cps.mean(sigma * one, one, step)
    assert clean.item() == pytest.approx(1 - fraction * sigma, abs=1e-9)
    power = noise.item() ** 2 + cps.std(step, zero).item() ** 2
    assert power == pytest.approx((fraction * sigma) ** 2, abs=1e-9)


@pytest.mark.parametrize("level", [1.0, 0.999999])
def test_cps_at_full_level_stays_finite_in_float32(level: float) -> None:
    pinned = pin(shift_sigmas(uniform_sigmas(50), 7.0))
    step = Schedule(pinned, 1000 * pinned[:-1]).at(torch.arange(50))
    x, v = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(CPS(level).mean(x, v, step)).all()


@pytest.mark.parametrize("name", DENSITIES)
def test_gradient_of_the_log_prob_by_finite_differences(name: str) -> None:
    strategy = DENSITIES[name](0.6)

    def log_prob(velocity: torch.Tensor) -> torch.Tensor:
        return strategy.log_prob(SCORED, strategy.mean(X, velocity, BASE), strategy.std(BASE, X))

    assert torch.autograd.gradcheck(log_prob, (V.clone().requires_grad_(),))
