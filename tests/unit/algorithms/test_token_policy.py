"""What holds for every policy-gradient algorithm of a language model, on a model with the stack of training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch

from tests.checkpoints import undone
from tests.tiny_language_policy import language_policy, off_policy, scored, text, train_text, with_text, written
from tests.tiny_policy import context, gradient_of, last_gradient, relative_difference, weights_of
from unirl.algorithms.base import AlgorithmOutput
from unirl.algorithms.cispo import CISPO
from unirl.algorithms.dppo import DPPO
from unirl.algorithms.drpo import DRPO
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.gspo import GSPO
from unirl.algorithms.ppo import PPO
from unirl.algorithms.token_policy import Correction, TokenPolicy
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.critic import Critic
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.planner import TokenGeometry
from unirl.types.sample import Part

ALGORITHMS: dict[str, type[TokenPolicy]] = {cls.__name__: cls for cls in (GRPO, GSPO, DPPO, DRPO, CISPO, PPO)}
REWARDS = [0.0, 2.0, 4.0, 2.0]  # advantages -1, 1, 1, -1
HORIZON = {"aggregation": "seq-mean-token-sum-norm", "horizon": 8}
AGGREGATIONS: list[dict[str, Any]] = [{"aggregation": "token-mean"}, {"aggregation": "seq-mean-token-mean"}, HORIZON]


@pytest.fixture(scope="module")
def backend() -> FSDPBackend:
    """With a critic whose values are not 0, and a reference; every test leaves it as it was."""
    backend = language_policy(reference=True, critic=True)
    assert backend.stage.bundle.critic is not None
    with torch.no_grad():
        for number, parameter in enumerate(backend.stage.bundle.critic.parameters()):
            parameter.copy_(torch.linspace(-0.2, 0.3, parameter.numel()).view(parameter.shape) + number)
    return backend


@pytest.fixture(autouse=True)
def as_it_was(backend: FSDPBackend) -> Any:
    with undone(backend):
        yield


@pytest.fixture(scope="module")
def part(backend: FSDPBackend) -> Part:
    return scored(written(backend), REWARDS)


def away(part: Part) -> Part:
    """`part` as if an older policy had written it, with ratios between 0.5 and 2."""
    return off_policy(part, torch.linspace(-0.7, 0.7, len(text(part).tokens)))


def with_values(backend: FSDPBackend, algorithm: TokenPolicy, part: Part) -> Part:
    """`part` with the advantages of a critic, where the algorithm has one."""
    gae = algorithm.needs.values
    if gae is None:
        return part
    valued = Critic(backend, TokenGeometry()).valued(part)
    assert valued is not None
    return gae.of(valued)


def gradient(backend: FSDPBackend, algorithm: TokenPolicy, part: Part, **geometry: Any) -> torch.Tensor:
    """The gradient of one optimizer step, which is then undone."""
    with undone(backend):
        train_text(backend, algorithm, with_values(backend, algorithm, part), **geometry)
        return last_gradient(backend).clone()


def loss(backend: FSDPBackend, algorithm: TokenPolicy, part: Part) -> AlgorithmOutput:
    own = context(backend)
    return algorithm.loss(own, part, algorithm.anchors(own, part))


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda settings: settings["aggregation"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_cut_into_micro_batches_does_not_change_the_gradient(
    backend: FSDPBackend, part: Part, name: str, aggregation: dict[str, Any]
) -> None:
    algorithm = ALGORITHMS[name](anchor="rollout", kl_coef=0.1, **aggregation)
    whole = gradient(backend, algorithm, away(part))
    assert float(whole.norm()) > 1e-4
    for geometry in ({"micro_batch_size": 1}, {"micro_batch_size": 2}, {"token_budget": 14}):
        assert relative_difference(gradient(backend, algorithm, away(part), **geometry), whole) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_at_unchanged_weights_the_ratio_is_exactly_1_in_the_first_update_and_only_there(
    backend: FSDPBackend, part: Part, name: str
) -> None:
    algorithm = ALGORITHMS[name]()
    given = with_values(backend, algorithm, part)
    report = train_text(backend, algorithm, given, num_updates_per_batch=2, micro_batch_size=1)
    assert report["train/first_ratio_deviation"].value == 0
    assert report["train/ratio_deviation"].value > 1e-4


@pytest.mark.parametrize("anchor", ["rollout", "replay"])
def test_what_the_rollout_recorded_is_compared_with_the_replay_whatever_pi_old_is(
    backend: FSDPBackend, part: Part, anchor: Literal["rollout", "replay"]
) -> None:
    """Half a nat is missing in what was recorded of each token; of samples of other weights nothing is said."""
    algorithm = GRPO(anchor=anchor)
    with undone(backend):
        report = train_text(backend, algorithm, part, num_updates_per_batch=2)
    assert report["train/rollout_gap_max"].value < 1e-5
    shifted = with_text(part, log_probs=text(part).log_probs - 0.5)
    with undone(backend):
        report = train_text(backend, algorithm, shifted, num_updates_per_batch=2)
    assert report["train/rollout_gap"].value == pytest.approx(0.5, abs=1e-5)
    assert report["train/rollout_gap_max"].value == pytest.approx(0.5, abs=1e-5)
    older = dataclasses.replace(shifted, version=torch.full((len(part),), -1))
    with undone(backend):
        assert "train/rollout_gap" not in train_text(backend, algorithm, older)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pi_old_stays_what_it_was_before_the_first_of_several_updates(
    backend: FSDPBackend, part: Part, name: str
) -> None:
    """What the rollout recorded is pi_old up to rounding, and does not move."""
    frozen, recorded = ALGORITHMS[name](), ALGORITHMS[name](anchor="rollout")
    two = {"num_updates_per_batch": 2}
    assert relative_difference(gradient(backend, frozen, part, **two), gradient(backend, recorded, part, **two)) < 1e-3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_where_nothing_is_trained_no_step_is_taken(backend: FSDPBackend, part: Part, name: str) -> None:
    algorithm, before = ALGORITHMS[name](kl_coef=0.1), weights_of(backend)
    masked = with_text(part, loss_mask=torch.zeros(len(text(part).tokens), dtype=torch.bool))
    report = train_text(backend, algorithm, with_values(backend, algorithm, masked), micro_batch_size=2)
    assert {name: metric.value for name, metric in report.items()} == {"train/empty_updates": 1.0}
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
    assert backend.version == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_responses_train_as_if_they_were_not_there(backend: FSDPBackend, part: Part, name: str) -> None:
    """One micro-batch is masked whole, whose log-probs are NaN."""
    algorithm = ALGORITHMS[name](anchor="rollout")
    lengths, given = text(part).lengths.tolist(), away(part)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    mask[: lengths[0]] = False
    log_probs = text(given).log_probs.masked_fill(~mask, torch.nan)
    masked = gradient(backend, algorithm, with_text(given, loss_mask=mask, log_probs=log_probs), micro_batch_size=1)
    assert relative_difference(masked, gradient(backend, algorithm, given.select([1, 2, 3]))) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_response_without_a_reward_carries_no_gradient(backend: FSDPBackend, name: str) -> None:
    algorithm = ALGORITHMS[name]()
    given = scored(written(backend), [0.0, 2.0, math.nan, 4.0])
    assert (
        relative_difference(gradient(backend, algorithm, given), gradient(backend, algorithm, given.select([0, 1, 3])))
        < 1e-5
    )


def test_the_gradient_is_that_of_the_mean_over_the_trained_tokens() -> None:
    """On policy the surrogate's gradient is the plain policy gradient, `-mean(A grad log pi)`."""
    backend = language_policy()
    part = scored(written(backend), REWARDS)
    lengths = text(part).lengths
    weights = torch.tensor([-1.0, 1.0, 1.0, -1.0]).repeat_interleave(lengths)
    plain = -(weights * backend.stage.replay(part).log_probs).mean()
    expected = gradient_of(backend, plain)
    train_text(backend, GRPO(), part)
    assert relative_difference(last_gradient(backend), expected) < 1e-5


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_the_kl_to_the_initial_weights_enters_with_its_weight(lora: LoRA | None) -> None:
    backend = language_policy(reference=True, lora=lora, optimizer=AdamW(lr=1e-2))
    part = scored(written(backend), REWARDS)
    assert float(loss(backend, GRPO(kl_coef=1.0), part).means["train/kl"].abs().max()) == 0
    for _ in range(3):
        train_text(backend, GRPO(), part)
    plain, with_kl = loss(backend, GRPO(), part).losses, loss(backend, GRPO(kl_coef=10.0), part)
    assert float(with_kl.means["train/kl"].mean()) > 1e-5
    torch.testing.assert_close(with_kl.losses - plain, 10.0 * with_kl.means["train/kl"], rtol=1e-3, atol=1e-6)


def test_advantages_come_before_training(backend: FSDPBackend) -> None:
    with pytest.raises(AssertionError, match="advantages come before training"):
        loss(backend, GRPO(), written(backend))


# Samples of another engine


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_for_samples_of_the_policy_itself_the_correction_is_1_up_to_rounding(
    backend: FSDPBackend, part: Part, name: str, level: Any
) -> None:
    corrected = ALGORITHMS[name](correction=Correction(level=level))
    report = train_text(backend, corrected, with_values(backend, corrected, part))
    assert report["train/correction"].value == pytest.approx(1, abs=1e-5)
    assert report["train/correction_max"].value == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(cap=1.5), [1.25, 1.5, 0.5]),
        (Correction(cap=1.5, floor=0.6), [1.25, 0.0, 0.0]),
        (Correction(level="sequence", cap=10.0), [1.25 * 4 * 0.5] * 3),
        (Correction(level="sequence", cap=2.0), [2.0] * 3),
    ],
)
def test_the_weight_of_a_token_is_pi_old_over_the_engines_probability(
    backend: FSDPBackend, part: Part, correction: Correction, expected: list[float]
) -> None:
    """The engine gave the first three tokens of each response 1/1.25, 1/4 and 1/0.5 of their probability."""
    lengths = text(part).lengths.tolist()
    shifts = torch.cat([torch.tensor([1.25, 4.0, 0.5] + [1.0] * (length - 3)).log() for length in lengths])
    given = off_policy(part, shifts)
    plain, output = loss(backend, GRPO(), given), loss(backend, GRPO(correction=correction), given)
    start = lengths[0]
    torch.testing.assert_close(
        output.means["train/correction"][start : start + 3], torch.tensor(expected), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(output.losses, plain.losses * output.means["train/correction"])
    assert not output.means["train/correction"].requires_grad


def test_the_correction_leaves_the_kl_as_it_is(backend: FSDPBackend, part: Part) -> None:
    train_text(backend, GRPO(), part)
    none = GRPO(kl_coef=1.0, correction=Correction(cap=1.0, floor=1.0))
    output = loss(backend, none, away(part))
    rejected = output.means["train/correction"] == 0
    assert int(rejected.sum()) > 5
    torch.testing.assert_close(output.losses[rejected], output.means["train/kl"][rejected])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cap": 0.5}, "cap must be at least 1, the weight of a sample on policy, got 0.5"),
        ({"floor": 0.0}, r"floor must be in \(0, 1\] or null, got 0.0"),
        ({"floor": 1.5}, r"floor must be in \(0, 1\] or null, got 1.5"),
    ],
)
def test_bounds_that_reject_what_is_on_policy_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Correction(**settings)


def test_a_correction_of_the_rollout_against_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="with anchor=rollout they are one: set anchor=replay"):
        GRPO(anchor="rollout", correction=Correction())


def test_every_algorithm_is_a_frozen_dataclass_of_its_settings() -> None:
    for cls in ALGORITHMS.values():
        assert dataclasses.replace(cls(), kl_coef=0.1) == cls(kl_coef=0.1)
