"""One reverse step, against Flow-GRPO, DanceGRPO, MixGRPO, UniRL 0.2.0, verl-omni and Flow-Factory (files 01 .. 06)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.golden.golden import Case, assert_covered, load
from unirl.sde.steps import Schedule, Step
from unirl.sde.strategy import CPS, STRATEGIES, CPSUnnormalised, FlowSDE, SDEStrategy, row_mean

FILES = (
    "01_sde_flow_grpo",
    "02_sde_dance_grpo",
    "03_sde_mix_grpo",
    "04_sde_unirl",
    "05_sde_verl_omni",
    "06_sde_flow_factory",
)

# The authors' names of our kernels; a MixGRPO or DanceGRPO case says it by its function.
KERNELS = {
    "sde": "flow",
    "flow": "flow",
    "Flow-SDE": "flow",
    "flow_grpo_step": "flow",
    "dance": "dance",
    "dance_sde": "dance",
    "Dance-SDE": "dance",
    "dance_grpo_step": "dance",
    "DiffusionNFT solver.dance_grpo_step": "dance",
    "cps": "cps",
    "CPS": "cps",
}

# Cases that are no plain step of a kernel and have a test of their own below.
ODE = {
    "02_sde_dance_grpo": ("ode_mean_with_noise_step0_eta0.3", "ode_mean_with_noise_step4_eta0.3"),
    "03_sde_mix_grpo": (
        "flow_step0_a0.7_deterministic",
        "flow_step4_a0.7_deterministic",
        "dance_step0_eta0.3_ode",
        "dance_step4_eta0.3_ode",
        "dance_step8_eta0.3_ode",
    ),
}
OTHER = {
    "01_sde_flow_grpo": ("replay_cps_mixed_steps_0_4_8", "ode_step_with_logprob_steps_1_4_7"),
    "04_sde_unirl": (
        "dance_step4_eta0",
        "cps_step4_eta0",
        "flow_step4_bf16_storage",
        "cps_step4_bf16_storage",
        "flow_std_at_sigma_0.9999999403953552",
        "flow_std_at_sigma_0.9990234375",
        "flow_replay_step4",
        "dance_replay_step4",
        "cps_replay_step4",
    ),
}
WITHOUT_COUNTERPART = {
    "03_sde_mix_grpo": {
        "nft_solver_ddim_step1_eta0.7": "DDIM(eta) kernel: not one of ours",
        "nft_solver_ddim_step8_eta0.7": "DDIM(eta) kernel: not one of ours",
    }
}


@dataclasses.dataclass(frozen=True)
class Transition:
    """A case in our terms: x, velocity and noise `(3, 2, 2, 2)`, one step per row."""

    case: Case
    strategy: SDEStrategy
    steps: tuple[int, ...]
    dtype: torch.dtype

    @property
    def x(self) -> torch.Tensor:
        return self.case.input("x", self.dtype)

    @property
    def velocity(self) -> torch.Tensor:
        return self.case.input("v", self.dtype)

    @property
    def noise(self) -> torch.Tensor:
        return self.case.input("noise", self.dtype)

    @property
    def step(self) -> Step:
        return schedule(self.case).at(torch.tensor(self.steps))

    @property
    def std(self) -> torch.Tensor:
        return self.strategy.std(self.step, self.x)

    @property
    def mean(self) -> torch.Tensor:
        return self.strategy.mean(self.x, self.velocity, self.step)

    @property
    def is_last_step(self) -> bool:
        return 9 in self.steps

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype == self.dtype
        if self.dtype == torch.float64:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        else:
            # The std of the last Flow step is 0.006: a float32 residual carries fewer digits there.
            tolerance = 1e-5 if self.is_last_step else 2e-6
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def schedule(case: Case) -> Schedule:
    sigmas = case.input("sigmas", torch.float32)
    return Schedule(sigmas, 1000 * sigmas[:-1])


def kernel(inputs: dict[str, Any], *, cps: str = "cps") -> SDEStrategy:
    """Our kernel for the inputs of a case; a case that names none is DanceGRPO's."""
    name = KERNELS[inputs.get("kernel", inputs.get("function", "dance"))]
    level = inputs["noise_level"] if "noise_level" in inputs else inputs["eta"]
    return STRATEGIES[cps if name == "cps" else name](level)


def steps(inputs: dict[str, Any]) -> tuple[int, ...]:
    return tuple(inputs["step_index_per_sample"]) if "step_index_per_sample" in inputs else (inputs["step_index"],) * 3


def plain(file: str) -> list[Case]:
    apart = {*ODE.get(file, ()), *OTHER.get(file, ()), *WITHOUT_COUNTERPART.get(file, {})}
    return [case for name, case in load(file).items() if name not in apart]


def transitions(output: str, only: type[SDEStrategy] = SDEStrategy, *, last_cps: bool = True) -> Any:
    """Every plain step, of every file and in float64 and float32, for which the authors return `output`.

    last_cps: with the last CPS step, whose std is 0 and which has no density
    """
    chosen = [
        pytest.param(
            Transition(case, kernel(case.inputs), steps(case.inputs), dtype), id=f"{file[:2]}-{case.name}-{dtype}"
        )
        for file in FILES
        for case in plain(file)
        for dtype in (torch.float64, torch.float32)
        if output in case.outputs and isinstance(kernel(case.inputs), only)
        if last_cps or not isinstance(kernel(case.inputs), CPS) or 9 not in steps(case.inputs)
    ]
    return pytest.mark.parametrize("transition", chosen)


def cases(file: str, *names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(load(file)[name], id=name) for name in names])


@pytest.mark.parametrize("file", FILES)
def test_every_case_is_tested_or_listed(file: str) -> None:
    tested = [case.name for case in plain(file)] + list(ODE.get(file, ())) + list(OTHER.get(file, ()))
    assert_covered(file, tested, WITHOUT_COUNTERPART.get(file, {}))


@transitions("prev_sample_mean")
def test_mean_of_the_transition(transition: Transition) -> None:
    transition.assert_close(transition.mean, transition.case.output("prev_sample_mean"))


@transitions("std")
def test_std_of_the_transition(transition: Transition) -> None:
    expected = transition.case.output("std").expand(3).reshape(3, 1, 1, 1)
    transition.assert_close(transition.std, expected)


@transitions("prev_sample")
def test_next_latent_for_the_same_noise(transition: Transition) -> None:
    drawn = transition.strategy.draw(transition.mean, transition.std, transition.noise)
    transition.assert_close(drawn, transition.case.output("prev_sample"))


@transitions("log_prob", last_cps=False)
def test_log_prob_is_the_gaussian_density_of_the_next_latent(transition: Transition) -> None:
    drawn = transition.case.output("prev_sample", transition.dtype)
    log_prob = transition.strategy.log_prob(drawn, transition.mean, transition.std)
    transition.assert_close(log_prob, gaussian_log_prob(transition))


def gaussian_log_prob(transition: Transition) -> torch.Tensor:
    """The authors' number, or where it is no density, the right one."""
    outputs, case = transition.case.outputs, transition.case
    for right in ("log_prob_gaussian", "log_prob_with_constants"):
        if right in outputs:
            return case.output(right)
    if isinstance(transition.strategy, CPS):
        std = case.output("std")
        return case.output("log_prob") / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return case.output("log_prob")


@transitions("log_prob_per_element")
def test_log_prob_of_each_element_as_a_sample_of_its_own(transition: Transition) -> None:
    flat = dataclasses.replace(transition, strategy=kernel(transition.case.inputs, cps="cps_unnormalised"))
    drawn = transition.case.output("prev_sample", transition.dtype)
    log_prob = flat.strategy.log_prob(
        drawn.reshape(24, 1), flat.mean.reshape(24, 1), flat.std.expand_as(drawn).reshape(24, 1)
    )
    expected = transition.case.output("log_prob_per_element").flatten()
    if transition.dtype == torch.float64 or not isinstance(transition.strategy, FlowSDE) or not transition.is_last_step:
        transition.assert_close(log_prob, expected)
    else:  # one element alone does not average its rounding out
        torch.testing.assert_close(log_prob.double(), expected, rtol=1e-4, atol=1e-4)


@transitions("log_prob", CPS)
def test_the_unnormalised_cps_score_is_the_authors(transition: Transition) -> None:
    authors = dataclasses.replace(transition, strategy=CPSUnnormalised(transition.strategy.level))
    drawn = transition.case.output("prev_sample", transition.dtype)
    transition.assert_close(
        authors.strategy.log_prob(drawn, authors.mean, authors.std), transition.case.output("log_prob")
    )


@transitions("log_prob_gaussian", CPS)
def test_the_authors_cps_score_is_no_density(transition: Transition) -> None:
    difference = transition.case.output("log_prob_gaussian") - transition.case.output("log_prob")
    assert (difference.abs() > 0.1).all()


@transitions("log_prob_with_constants")
def test_mix_grpo_loses_the_constants_of_the_dance_density(transition: Transition) -> None:
    lost = transition.case.output("log_prob_with_constants") - transition.case.output("log_prob")
    expected = -transition.std.double().log().flatten() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(lost, expected, rtol=1e-6, atol=1e-6)
    assert (lost > 1).all()


@transitions("log_prob_without_normalizer")
def test_verl_omni_without_normaliser_drops_only_what_cancels_in_a_ratio(transition: Transition) -> None:
    dropped = transition.case.output("log_prob") - transition.case.output("log_prob_without_normalizer")
    expected = -transition.std.double().log().flatten() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(dropped, expected, rtol=1e-6, atol=1e-6)


@transitions("std_dev_t")
def test_std_dev_t_of_the_authors_is_the_std_or_the_coefficient(transition: Transition) -> None:
    """Flow: the coefficient. Dance: verl-omni the std, Flow-Factory the coefficient. CPS: the std."""
    dt = transition.step.sigma_next.double() - transition.step.sigma.double()
    name = transition.case.inputs["kernel"]
    per_std = torch.ones(3, dtype=torch.float64) if name in ("cps", "CPS", "dance_sde") else (-dt).rsqrt()
    transition.assert_close(transition.std.flatten(), transition.case.output("std_dev_t") / per_std)


@cases("01_sde_flow_grpo", "replay_cps_mixed_steps_0_4_8")
def test_flow_grpo_replay_of_cps(case: Case) -> None:
    velocity, log_prob = replayed(case, kernel(case.inputs, cps="cps_unnormalised"))
    torch.testing.assert_close(log_prob.detach(), case.output("log_prob_new"), rtol=1e-12, atol=1e-13)
    log_ratio = log_prob.detach() - case.output("log_prob_old")
    torch.testing.assert_close(log_ratio, case.output("log_ratio"), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(velocity, case.output("grad_velocity_of_sum_w_logprob"), rtol=1e-11, atol=1e-14)


@cases("04_sde_unirl", "flow_replay_step4", "dance_replay_step4", "cps_replay_step4")
def test_unirl_replay_and_its_gradient(case: Case) -> None:
    velocity, log_prob = replayed(case, kernel(case.inputs, cps="cps_unnormalised"))
    torch.testing.assert_close(log_prob.detach(), case.output("log_prob_new"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(velocity, case.output("grad_velocity_of_sum_w_logprob"), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("file", "name", "factors"),
    [
        ("01_sde_flow_grpo", "replay_cps_mixed_steps_0_4_8", [1.6676393, 0.9049478, 0.0001442]),
        ("04_sde_unirl", "cps_replay_step4", [1.0175721, 1.0175721, 1.0175721]),
    ],
)
def test_the_authors_cps_log_ratio_is_two_variances_of_the_true_one(file: str, name: str, factors: list[float]) -> None:
    """A factor of its own at every step, so that a clip range of one score means nothing to the other."""
    case = load(file)[name]
    strategy = kernel(case.inputs)
    x, stored = case.input("x"), case.input("prev_sample_stored")
    step = schedule(case).at(torch.tensor(steps(case.inputs)))
    std = strategy.std(step, x)
    old, new = (strategy.log_prob(stored, strategy.mean(x, case.input(v), step), std) for v in ("v", "v_new"))
    torch.testing.assert_close((new - old) * 2 * std.flatten() ** 2, case.output("log_ratio"), rtol=1e-10, atol=1e-13)
    assert (case.output("log_ratio") / (new - old)).tolist() == pytest.approx(factors, abs=1e-7)


def replayed(case: Case, strategy: SDEStrategy) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the weighted log-probs with respect to the velocity, and the log-probs."""
    velocity = case.input("v_new").requires_grad_()
    step = schedule(case).at(torch.tensor(steps(case.inputs)))
    x = case.input("x")
    log_prob = strategy.log_prob(
        case.input("prev_sample_stored"), strategy.mean(x, velocity, step), strategy.std(step, x)
    )
    (log_prob * case.input("weights_of_log_prob_in_the_scalar")).sum().backward()
    assert velocity.grad is not None
    return velocity.grad, log_prob


@cases("01_sde_flow_grpo", "ode_step_with_logprob_steps_1_4_7")
def test_flow_grpo_ode_step_is_euler_and_its_log_prob_is_no_density(case: Case) -> None:
    x, step = case.input("x"), schedule(case).at(torch.tensor([1, 4, 7]))
    ode = FlowSDE(0.0)
    drawn, mean = ode.mean(x, case.input("v"), step), ode.mean(x, case.input("v_new"), step)
    torch.testing.assert_close(drawn, case.output("prev_sample"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(mean, case.output("prev_sample_mean"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(row_mean(-((drawn - mean) ** 2)), case.output("log_prob"), rtol=1e-9, atol=1e-15)


@cases("02_sde_dance_grpo", *ODE["02_sde_dance_grpo"])
def test_dance_grpo_without_sde_solver_adds_noise_to_an_euler_mean(case: Case) -> None:
    """Not a kernel of ours: the drift does not pay for the noise. DanceGRPO trains with the SDE mean alone."""
    x, step = case.input("x"), schedule(case).at(torch.tensor(steps(case.inputs)))
    dance = kernel(case.inputs)
    mean, std = FlowSDE(0.0).mean(x, case.input("v"), step), dance.std(step, x)
    drawn = dance.draw(mean, std, case.input("noise"))
    torch.testing.assert_close(mean, case.output("prev_sample_mean"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(drawn, case.output("prev_sample"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dance.log_prob(drawn, mean, std), case.output("log_prob"), rtol=1e-12, atol=1e-13)
    assert (dance.mean(x, case.input("v"), step) - mean).abs().max() > 1e-3


@cases("03_sde_mix_grpo", *ODE["03_sde_mix_grpo"])
def test_mix_grpo_ode_step_is_euler_and_its_log_prob_is_meaningless(case: Case) -> None:
    """Flow: the SDE density of a sample that the SDE did not draw. Dance: 0. Ours has no log-prob at an ODE step."""
    x, step = case.input("x"), schedule(case).at(torch.tensor(steps(case.inputs)))
    strategy = kernel(case.inputs)
    drawn, std = FlowSDE(0.0).mean(x, case.input("v"), step), strategy.std(step, x)
    torch.testing.assert_close(drawn, case.output("prev_sample"), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(std.flatten(), case.output("std").expand(3), rtol=1e-12, atol=0)
    if isinstance(strategy, FlowSDE):
        density = strategy.log_prob(drawn, strategy.mean(x, case.input("v"), step), std)
        torch.testing.assert_close(density, case.output("log_prob"), rtol=1e-11, atol=1e-13)
    else:
        assert case.outputs["log_prob"] == [0, 0, 0]
        at_the_mean = strategy.log_prob(drawn, drawn, std)
        torch.testing.assert_close(at_the_mean, case.output("log_prob_with_constants"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@cases("04_sde_unirl", "dance_step4_eta0", "cps_step4_eta0")
def test_level_zero_is_euler(case: Case, dtype: torch.dtype) -> None:
    """Bit for bit here; the authors' CPS at level 0 is not bit-equal to Euler in float32."""
    x, step = case.input("x", dtype), schedule(case).at(torch.tensor(steps(case.inputs)))
    strategy = kernel(case.inputs)
    mean = strategy.mean(x, case.input("v", dtype), step)
    drawn = strategy.draw(mean, strategy.std(step, x), case.input("noise", dtype))
    euler = x + case.input("v", dtype) * (step.sigma_next.to(dtype) - step.sigma.to(dtype)).reshape(3, 1, 1, 1)
    assert torch.equal(drawn, euler)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(drawn.double(), case.output("prev_sample"), rtol=tolerance, atol=tolerance)
    assert case.float32["bitwise_equal_to_euler_in_float32"] is (case.inputs["kernel"] != "cps")


@cases("04_sde_unirl", "flow_step4_bf16_storage", "cps_step4_bf16_storage")
def test_what_is_stored_in_bfloat16_is_scored_as_stored(case: Case) -> None:
    strategy = kernel(case.inputs, cps="cps_unnormalised")
    x = case.input("x").to(torch.bfloat16)
    assert torch.equal(x.double(), case.input("x_rounded"))
    step = schedule(case).at(torch.tensor(steps(case.inputs)))
    mean, std = strategy.mean(x, case.input("v", torch.float32), step), strategy.std(step, x)
    drawn = strategy.draw(mean, std, case.input("noise", torch.float32))
    unrounded = case.output("prev_sample_unrounded_closed_form")
    torch.testing.assert_close(drawn.double(), unrounded, rtol=2e-6, atol=2e-6)
    assert torch.equal(drawn.to(torch.bfloat16).double(), case.output("prev_sample_stored"))
    log_prob = strategy.log_prob(drawn.to(torch.bfloat16), mean, std)
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), case.output("log_prob"), rtol=2e-6, atol=2e-6)


@cases("04_sde_unirl", "flow_std_at_sigma_0.9999999403953552", "flow_std_at_sigma_0.9990234375")
def test_flow_std_has_no_jump_within_rounding_of_sigma_one(case: Case) -> None:
    """1 - 2^-24 is pure noise in float32 (the authors' exact test gives 541.8); 0.999 is an honest value, 4.17."""
    first, second = case.inputs["sigma"], case.inputs["sigma_next"]
    table = Schedule(torch.tensor([first, second, 0.0]), torch.tensor([1000 * first, 1000 * second]))
    x = torch.zeros(1, 2, dtype=torch.float64)
    std = kernel(case.inputs).std(table.at(torch.tensor([0])), x).item()
    if first > 0.9999:
        assert std == pytest.approx(case.outputs["std_at_sigma_exactly_1"], rel=1e-6)
        assert case.outputs["std"] > 500
    else:
        assert std == pytest.approx(case.outputs["std"], rel=1e-12)
