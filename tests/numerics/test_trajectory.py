"""The two loops: what is stored is what was walked, and replay finds it again bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from unirl.sde.noise import StepNoise, initial_noise
from unirl.sde.schedule import pin, shift_sigmas, uniform_sigmas
from unirl.sde.solver import SOLVERS, History
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import STRATEGIES, DanceSDE, FlowSDE, SDEStrategy
from unirl.sde.trajectory import Predict, replay_trajectory, sample_trajectory
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segment import LatentSegment

IDS = [f"r0.p{row // 2}/{row % 2}" for row in range(6)]
SHAPE = (2, 3, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def schedule_of(steps: int, shift: float = 3.0) -> Schedule:
    sigmas = pin(shift_sigmas(uniform_sigmas(steps), shift))
    return Schedule(sigmas, 1000 * sigmas[:-1])


@dataclasses.dataclass
class Model:
    """A nonlinear elementwise model whose answer depends on the time and on the row's own condition.

    Its output in a row does not depend on the other rows, bit for bit, so that parity is a property of the loops alone.
    """

    weight: float = 1.0
    dtype: torch.dtype = torch.float32
    calls: int = 0

    def __call__(self, latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        condition = (rows.float() * 0.1)[:, None, None, None]
        time = (step.time / 1000)[:, None, None, None]
        return (self.weight * torch.tanh(latents.float() + condition) * (1 + time) - 0.3 * latents.float()).to(
            self.dtype
        )


def sampled(
    predict: Predict,
    steps: int,
    sde: tuple[int, ...],
    *,
    strategy: SDEStrategy | None = None,
    solver: str = "euler",
    ids: list[str] = IDS,
    storage: torch.dtype = torch.float32,
) -> LatentSegment:
    return sample_trajectory(
        predict,
        initial_noise(ids, SHAPE, 5),
        schedule_of(steps),
        strategy=strategy or FlowSDE(0.7),
        solver=SOLVERS[solver],
        sde_indices=sde,
        noise=StepNoise(ids, 5),
        storage_dtype=storage,
    )


@pytest.mark.parametrize("storage", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["flow", "dance", "cps", "cps_unnormalised"])
def test_replay_gives_the_log_probs_of_the_rollout_bit_for_bit(name: str, storage: torch.dtype) -> None:
    strategy = STRATEGIES[name](0.6)
    segment = sampled(Model(), 8, (0, 1, 2, 3, 4, 5, 6), strategy=strategy, storage=storage)
    replay = replay_trajectory(Model(), segment, segment.sde_indices, strategy=strategy)
    assert torch.equal(replay.log_probs, segment.log_probs)
    assert torch.equal((replay.log_probs - segment.log_probs).exp(), torch.ones(6, 7))


@pytest.mark.parametrize("storage", DTYPES, ids=str)
def test_replay_of_all_steps_at_once_equals_step_by_step_and_row_by_row(storage: torch.dtype) -> None:
    strategy = DanceSDE(0.3)
    segment = sampled(Model(), 8, (0, 2, 3, 6), strategy=strategy, storage=storage)
    together = replay_trajectory(Model(), segment, segment.sde_indices, strategy=strategy)
    for column, step in enumerate(segment.sde_indices):
        alone = replay_trajectory(Model(), segment, step[None], strategy=strategy)
        assert torch.equal(alone.log_probs[:, 0], together.log_probs[:, column])
        assert torch.equal(alone.means[:, 0], together.means[:, column])
        assert torch.equal(alone.stds[:, 0], together.stds[:, column])
        assert alone.dts[0] == together.dts[column]

    def model_of(row: int) -> Predict:
        return lambda latents, step, rows: Model()(latents, step, rows + row)

    for row in range(6):
        own = replay_trajectory(model_of(row), segment.select([row]), segment.sde_indices, strategy=strategy)
        assert torch.equal(own.log_probs[0], together.log_probs[row])


def test_replay_works_on_a_fresh_model_and_in_any_order_of_samples() -> None:
    segment = sampled(Model(), 6, (1, 3))
    order = [4, 0, 5, 2, 1, 3]

    def reordered(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        return Model()(latents, step, torch.tensor(order)[rows])

    replay = replay_trajectory(reordered, segment.select(order), segment.sde_indices, strategy=FlowSDE(0.7))
    assert torch.equal(replay.log_probs, segment.log_probs[order])


@pytest.mark.parametrize("storage", DTYPES, ids=str)
def test_the_trajectory_stored_is_the_trajectory_walked(storage: torch.dtype) -> None:
    """Each latent that the model sees is the stored one, in the storage dtype."""
    seen: list[torch.Tensor] = []

    def watching(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        seen.append(latents.clone())
        return Model()(latents, step, rows)

    segment = sampled(watching, 7, (0, 1, 2, 3, 4, 5), storage=storage)
    assert segment.latents.dtype == storage
    assert segment.positions.tolist() == list(range(8))
    for position, latents in enumerate(seen):
        assert latents.dtype == storage
        assert torch.equal(segment.latents[:, position], latents)
    assert segment.log_probs.dtype == torch.float32


def test_bfloat16_storage_scores_the_rounded_latent() -> None:
    """Against float64 by hand; the score of the unrounded latent is another number."""
    strategy = FlowSDE(0.7)
    segment = sampled(Model(), 6, (2,), strategy=strategy, storage=torch.bfloat16)
    step = schedule_of(6).at(torch.full((6,), 2))
    x, x_next = segment.at(torch.tensor([2]))[:, 0], segment.at(torch.tensor([3]))[:, 0]
    velocity = Model()(x, step, torch.arange(6))
    mean, std = strategy.mean(x.double(), velocity, step), strategy.std(step, x.double())
    normal = torch.distributions.Normal(mean, std.expand_as(mean))
    expected = normal.log_prob(x_next.double()).flatten(1).mean(1)
    torch.testing.assert_close(segment.log_probs[:, 0].double(), expected, rtol=1e-6, atol=1e-6)
    source = StepNoise(IDS, 5)
    unrounded = normal.log_prob(mean + std * source.draw(SHAPE)).flatten(1).mean(1)
    assert (segment.log_probs[:, 0].double() - unrounded).abs().max() > 1e-4


def test_model_in_bfloat16_replays_bit_for_bit() -> None:
    segment = sampled(Model(dtype=torch.bfloat16), 6, (0, 1, 2, 3, 4))
    replay = replay_trajectory(Model(dtype=torch.bfloat16), segment, segment.sde_indices, strategy=FlowSDE(0.7))
    assert torch.equal(replay.log_probs, segment.log_probs)


def test_at_ratio_one_the_surrogate_has_the_plain_policy_gradient() -> None:
    weight = torch.tensor(1.0, requires_grad=True)

    def trained(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        condition = (rows.float() * 0.1)[:, None, None, None]
        time = (step.time / 1000)[:, None, None, None]
        return weight * torch.tanh(latents + condition) * (1 + time) - 0.3 * latents

    segment = sampled(Model(), 6, (0, 2, 4))
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.5, 2.0])[:, None]
    new = replay_trajectory(trained, segment, segment.sde_indices, strategy=FlowSDE(0.7)).log_probs
    assert torch.equal(new, segment.log_probs)
    (surrogate,) = torch.autograd.grad((advantages * (new - segment.log_probs).exp()).mean(), weight, retain_graph=True)
    (policy_gradient,) = torch.autograd.grad((advantages * new).mean(), weight)
    assert surrogate == policy_gradient
    assert surrogate != 0


# Which steps are stochastic


def test_deterministic_steps_between_stochastic_ones_are_the_solvers() -> None:
    segment = sampled(Model(), 6, (1, 4))
    assert segment.positions.tolist() == [1, 2, 4, 5, 6]
    x = initial_noise(IDS, SHAPE, 5)
    schedule, rows = schedule_of(6), torch.arange(6)
    step = schedule.at(torch.zeros(6, dtype=torch.long))
    x, _ = SOLVERS["euler"](x, Model()(x, step, rows), step, None)
    assert torch.equal(segment.at(torch.tensor([1]))[:, 0], x)
    last = segment.at(torch.tensor([5]))[:, 0]
    step = schedule.at(torch.full((6,), 5))
    assert torch.equal(segment.final, SOLVERS["euler"](last, Model()(last, step, rows), step, None)[0])


def test_a_multistep_solver_starts_anew_after_a_stochastic_step() -> None:
    seen: list[tuple[int, bool]] = []

    def solver(
        x: torch.Tensor, velocity: torch.Tensor, step: Step, history: History | None
    ) -> tuple[torch.Tensor, History | None]:
        seen.append((int(step.index[0]), history is None))
        return SOLVERS["dpmpp_2m"](x, velocity, step, history)

    sample_trajectory(
        Model(),
        initial_noise(IDS, SHAPE, 5),
        schedule_of(7),
        strategy=FlowSDE(0.7),
        solver=solver,
        sde_indices=(2, 3),
        noise=StepNoise(IDS, 5),
        storage_dtype=torch.float32,
    )
    assert seen == [(0, True), (1, False), (4, True), (5, False), (6, False)]


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_an_ode_rollout_records_the_final_latent_and_no_log_prob(solver: str) -> None:
    segment = sampled(Model(), 5, (), solver=solver)
    assert segment.positions.tolist() == [5]
    assert segment.log_probs.shape == (6, 0)
    assert segment.latents.shape == (6, 1, *SHAPE)


@pytest.mark.parametrize("steps", [1, 2, 5, 14, 15])
def test_the_steps_walked_are_the_steps_asked_for(steps: int) -> None:
    model = Model()
    segment = sampled(model, steps, tuple(range(steps - 1)))
    assert model.calls == steps
    assert segment.num_steps == steps
    assert len(segment.sigmas) == steps + 1


def test_all_steps_but_the_last_are_scored_and_finite() -> None:
    for name in STRATEGIES:
        sampling = DiffusionSamplingParams(steps=10, height=8, width=8, noise_level=0.7)
        chosen = sampling.resolve_sde_indices(0)
        assert chosen == tuple(range(9))
        segment = sampled(Model(), 10, chosen, strategy=STRATEGIES[name](0.7))
        assert torch.isfinite(segment.log_probs).all()
        assert segment.log_probs.shape == (6, 9)


def test_the_final_latent_carries_no_noise_of_its_own() -> None:
    """The last step is Euler, which ends at the model's x0: `x - sigma v`."""
    segment = sampled(Model(), 4, (0, 1, 2))
    x, step = segment.at(torch.tensor([3]))[:, 0], schedule_of(4).at(torch.full((6,), 3))
    clean = x - step.sigma[:, None, None, None] * Model()(x, step, torch.arange(6))
    torch.testing.assert_close(segment.final, clean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_stochastic_steps_at_level_zero_walk_the_ode_bit_for_bit(name: str) -> None:
    ode = sampled(Model(), 6, ())
    flat = sampled(Model(), 6, (0, 1, 2, 3, 4), strategy=STRATEGIES[name](0.0))
    assert torch.equal(flat.final, ode.final)


# One schedule on both sides


@pytest.mark.parametrize("steps", [20, 50])
def test_replay_consumes_the_recorded_sigmas_and_not_times_divided_by_a_thousand(steps: int) -> None:
    """A table made in float32: dividing its times by 1000 gives another sigma in one entry."""
    grid = torch.linspace(1, 0, steps + 1)
    sigmas = 3 * grid / (1 + 2 * grid)
    segment = sample_trajectory(
        Model(),
        initial_noise(IDS, SHAPE, 5),
        Schedule(sigmas, 1000 * sigmas[:-1]),
        strategy=FlowSDE(0.7),
        solver=SOLVERS["euler"],
        sde_indices=tuple(range(steps - 1)),
        noise=StepNoise(IDS, 5),
        storage_dtype=torch.float32,
    )
    assert torch.equal(segment.sigmas, sigmas)
    assert int((segment.times / 1000 != sigmas[:-1]).sum()) == 1
    seen: list[Step] = []

    def watching(latents: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        seen.append(step)
        return Model()(latents, step, rows)

    replay_trajectory(watching, segment, segment.sde_indices, strategy=FlowSDE(0.7))
    assert len(seen) == 1
    assert torch.equal(seen[0].sigma, segment.sigmas[:-2].repeat(6))
    assert torch.equal(seen[0].sigma_next, segment.sigmas[1:-1].repeat(6))
    assert torch.equal(seen[0].time, segment.times[:-1].repeat(6))
    assert torch.equal(seen[0].sigma_star[:2], segment.sigmas[1:2].repeat(2))


def test_replay_refuses_a_step_that_the_rollout_did_not_draw() -> None:
    """With SDE steps 0 and 2 the ends of step 1 are recorded too, yet its transition has no density."""
    segment = sampled(Model(), 5, (0, 2))
    assert {1, 2} <= set(segment.positions.tolist())
    with pytest.raises(ValueError, match=r"steps \[0, 1\] have no density: stochastic in the rollout were \[0, 2\]"):
        replay_trajectory(Model(), segment, torch.tensor([0, 1]), strategy=FlowSDE(0.7))


def test_replay_of_one_step_reports_its_dt() -> None:
    segment = sampled(Model(), 5, (0, 2))
    replay = replay_trajectory(Model(), segment, torch.tensor([2]), strategy=FlowSDE(0.7))
    assert replay.dts.tolist() == [(segment.sigmas[3] - segment.sigmas[2]).item()]
    assert replay.means.shape == (6, 1, *SHAPE)
    assert replay.stds.shape == (6, 1, 1, 1, 1)
