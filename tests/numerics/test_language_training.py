"""The training of a language model through the real stack: ratio 1, one denominator a step, what is masked is out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.tiny_language import PROMPTS, OtherLM, TokenSlope, lengths_of, rewarded
from tests.tiny_language_policy import language_policy, text, train_text, written
from tests.tiny_policy import gradient_of, last_gradient, relative_difference, saved, weights_of
from unirl.algorithms.grpo import GRPO
from unirl.algorithms.token_losses import Aggregation
from unirl.train.lora import LoRA
from unirl.train.optim import AdamW
from unirl.train.stack.planner import Batch, TokenGeometry, plan
from unirl.types.metric import values
from unirl.types.sample import Part

MOTIONLESS = AdamW(lr=1e-30)
MODEL = OtherLM(kind="qwen3")
WRITING = {"max_new_tokens": 12, "stop_token_ids": tuple(range(0, 40, 5))}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {},
    {"temperature": 1.3},
    {"temperature": 0.5, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 12},
]
GEOMETRIES: list[dict[str, Any]] = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 4}, {"token_budget": 40}]


def samples(backend: Any, **settings: Any) -> Part:
    """4 rows to each of 3 prompts, of unequal lengths."""
    part = rewarded(written(backend, prompts=PROMPTS, group=4, **{**WRITING, **settings}))
    assert len(text(part).lengths.unique()) > 3
    assert part.advantages is not None
    assert part.advantages.any()
    return part


def older(part: Part) -> Part:
    """`part` as made by earlier weights: pi_old is then replayed before the updates."""
    assert part.version is not None
    return dataclasses.replace(part, version=part.version - 1)


# Ratio 1


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("of_these_weights", [True, False])
def test_at_unchanged_weights_the_ratio_is_exactly_1(sampling: dict[str, Any], of_these_weights: bool) -> None:
    """Two updates at a learning rate that moves nothing, in every geometry."""
    for geometry in GEOMETRIES:
        backend = language_policy(MODEL, optimizer=MOTIONLESS)
        part = samples(backend, **sampling)
        given = part if of_these_weights else older(part)
        report = values(train_text(backend, GRPO(), given, num_updates_per_batch=2 if len(geometry) else 1, **geometry))
        assert report["train/ratio_deviation"] == 0.0
        assert report["train/clip_fraction"] == 0.0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_log_probs_of_the_rollout_are_those_of_the_replay_up_to_rounding(
    sampling: dict[str, Any], compute_dtype: str
) -> None:
    """The distribution that was sampled: temperature and the kept tokens included."""
    backend = language_policy(MODEL, optimizer=MOTIONLESS, compute_dtype=compute_dtype)
    part = samples(backend, **sampling)
    report = values(train_text(backend, GRPO(anchor="rollout"), part, token_budget=40))
    limit = 5e-5 if compute_dtype == "float32" else 0.3
    assert 0 < report["train/ratio_deviation"] < limit


def test_log_probs_of_another_temperature_or_support_would_not_be() -> None:
    backend = language_policy(MODEL, optimizer=MOTIONLESS)
    part = samples(backend, temperature=1.3, top_p=0.8)
    assert part.sampling is not None
    segment = text(part)
    untempered = dataclasses.replace(part, sampling=dataclasses.replace(part.sampling, temperature=1.0))
    whole = dataclasses.replace(
        part, segment=dataclasses.replace(segment, support=None, support_sizes=None, support_total=None)
    )
    for wrong in (untempered, whole):
        report = values(train_text(backend, GRPO(anchor="rollout"), wrong))
        assert report["train/ratio_deviation"] > 0.1


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4)])
def test_at_the_start_the_kl_to_the_reference_is_exactly_0(lora: LoRA | None) -> None:
    backend = language_policy(MODEL, lora=lora, reference=True)
    report = values(train_text(backend, GRPO(kl_coef=0.1), samples(backend), token_budget=40))
    assert report["train/kl"] == 0.0
    again = values(train_text(backend, GRPO(kl_coef=0.1), samples(backend), token_budget=40))
    assert again["train/kl"] > 0.0


# The gradient


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_p": 0.8, "top_k": 12}], ids=str)
def test_at_ratio_1_the_gradient_is_the_plain_policy_gradient(sampling: dict[str, Any]) -> None:
    """-mean A grad log pi over all tokens."""
    backend = language_policy(MODEL)
    part = samples(backend, **sampling)
    assert part.advantages is not None
    advantages = part.advantages.repeat_interleave(text(part).lengths)
    expected = gradient_of(backend, -(advantages * backend.stage.replay(part).log_probs).mean())
    train_text(backend, GRPO(), part)
    assert relative_difference(last_gradient(backend), expected) < 1e-5


@pytest.mark.parametrize(
    ("aggregation", "horizon"),
    [("token-mean", None), ("seq-mean-token-mean", None), ("seq-mean-token-sum-norm", 12)],
)
@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(rank=2, alpha=4)}, {"gradient_checkpointing": True}], ids=str)
def test_it_does_not_depend_on_how_the_rollout_is_cut_or_ordered(
    aggregation: Aggregation, horizon: int | None, settings: dict[str, Any]
) -> None:
    algorithm = GRPO(aggregation=aggregation, horizon=horizon)
    part = samples(language_policy(MODEL, **settings))
    found = []
    for turned, geometry in [*((False, own) for own in GEOMETRIES), (True, {"token_budget": 30})]:
        backend = language_policy(MODEL, **settings)
        rows = part.select(list(reversed(range(len(part))))) if turned else part
        train_text(backend, algorithm, rows, **geometry)
        found.append(last_gradient(backend))
    assert float(found[0].norm()) > 0
    assert all(relative_difference(other, found[0]) < 1e-5 for other in found[1:])


def test_over_two_updates_pi_old_stands_still_and_the_ratio_leaves_1() -> None:
    backend, geometry = language_policy(MODEL), TokenGeometry(num_updates_per_batch=2)
    part = samples(backend)
    report = values(train_text(backend, GRPO(), part, num_updates_per_batch=2))
    assert report["train/first_ratio_deviation"] == 0.0
    (first,), (second,) = plan(Batch.of(part, 0, ranks=1), geometry)
    alone = language_policy(MODEL)
    train_text(alone, GRPO(), first)
    ratio = (alone.stage.replay(second).log_probs - text(second).log_probs).exp()
    expected = float((ratio.detach() - 1).abs().max())
    assert expected > 1e-3
    assert report["train/ratio_deviation"] == pytest.approx(expected, rel=1e-2)


# One denominator for the whole step


def gradient_of_each_weight(part: Part, algorithm: TokenSlope, **geometry: Any) -> tuple[float, float]:
    """The gradient, which is one number in all weights, and the reported loss."""
    backend = language_policy()
    report = values(train_text(backend, algorithm, part, **geometry))
    gradient = last_gradient(backend)
    assert torch.allclose(gradient, gradient[0], rtol=1e-6)
    return float(gradient[0]), report["train/loss"]


@pytest.mark.parametrize("micro", [None, 1, 2])
@pytest.mark.parametrize(
    ("aggregation", "horizon", "expected"),
    [("token-mean", None, 0.5), ("seq-mean-token-mean", None, 0.0), ("seq-mean-token-sum-norm", 4, 0.25)],
)
def test_a_mean_over_tokens_is_over_those_of_the_step_and_not_of_a_micro_batch(
    aggregation: Aggregation, horizon: int | None, micro: int | None, expected: float
) -> None:
    """Lengths 1 and 3 with losses -1 and 1: (3 - 1) / 4; a micro-batch of one row each would give 0."""
    part = lengths_of([1, 3], [-1.0, 1.0])
    found = gradient_of_each_weight(part, TokenSlope(aggregation=aggregation, horizon=horizon), micro_batch_size=micro)
    assert found == pytest.approx((expected, expected), abs=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "horizon", "expected"),
    [("token-mean", None, 1.25), ("seq-mean-token-mean", None, 1.5), ("seq-mean-token-sum-norm", 4, 0.625)],
)
def test_the_three_aggregations_in_numbers(aggregation: Aggregation, horizon: int | None, expected: float) -> None:
    """Token losses 2 | 1 1 1."""
    algorithm = TokenSlope(aggregation=aggregation, horizon=horizon)
    for micro in (None, 1):
        found = gradient_of_each_weight(lengths_of([1, 3], [2.0, 1.0]), algorithm, micro_batch_size=micro)
        assert found == pytest.approx((expected, expected))


@pytest.mark.parametrize("micro", [None, 1, 2])
def test_the_reported_loss_is_the_optimised_one(micro: int | None) -> None:
    """Losses 2 and 4: 3, neither their sum nor half of their mean."""
    found = gradient_of_each_weight(lengths_of([3, 3], [2.0, 4.0]), TokenSlope(), micro_batch_size=micro)
    assert found == pytest.approx((3.0, 3.0))


# What is not trained


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_masked_tokens_leave_the_denominator(aggregation: Aggregation, micro: int | None) -> None:
    """Lengths 2 and 6, the second one masked, token loss 1: 1, not 2 / 8."""
    part = lengths_of([2, 6], [1.0, 1.0], masked=[1])
    found = gradient_of_each_weight(part, TokenSlope(aggregation=aggregation), micro_batch_size=micro)
    assert found == pytest.approx((1.0, 1.0))


def test_rows_without_a_reward_leave_it_too() -> None:
    part = lengths_of([2, 6, 1], [1.0, 100.0, 4.0], rewards=[0.0, math.nan, 0.0])
    for geometry in ({}, {"micro_batch_size": 1}, {"token_budget": 5}):
        assert gradient_of_each_weight(part, TokenSlope(), **geometry) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("geometry", [{}, {"micro_batch_size": 1}, {"token_budget": 30}], ids=str)
@pytest.mark.parametrize("of_these_weights", [True, False])
def test_a_rollout_whose_tokens_are_all_masked_takes_no_step_and_says_so(
    geometry: dict[str, Any], of_these_weights: bool
) -> None:
    backend = language_policy(MODEL)
    part = samples(backend)
    segment = text(part)
    masked = dataclasses.replace(
        part, segment=dataclasses.replace(segment, loss_mask=torch.zeros_like(segment.loss_mask))
    )
    before = saved(backend)
    given = masked if of_these_weights else older(masked)
    report = values(train_text(backend, GRPO(), given, num_updates_per_batch=2, **geometry))
    after = backend.state()
    assert report == {"train/empty_updates": 2.0}
    assert all(torch.equal(after["parameters"][name], value) for name, value in before["parameters"].items())
    assert (after["steps"], after["version"]) == (0, 0)


@pytest.mark.parametrize("of_these_weights", [True, False])
def test_a_masked_row_trains_nothing_even_where_its_log_prob_is_nan(of_these_weights: bool) -> None:
    """The tokens of a tool have no log-prob."""
    part = samples(language_policy(MODEL))
    segment, row = text(part), 2
    rows = torch.arange(len(part)).repeat_interleave(segment.lengths)
    mask, log_probs = rows != row, segment.log_probs.masked_fill(rows == row, math.nan)
    masked = dataclasses.replace(part, segment=dataclasses.replace(segment, loss_mask=mask, log_probs=log_probs))
    gone = part.select([number for number in range(len(part)) if number != row])
    for anchor in ("replay", "rollout"):
        found = []
        for own in (masked, gone):
            backend = language_policy(MODEL)
            given = own if of_these_weights else older(own)
            report = values(train_text(backend, GRPO(anchor=anchor), given, token_budget=40))
            assert report["train/skipped"] == 0.0
            found.append(last_gradient(backend))
        assert relative_difference(*found) < 1e-5


def test_a_log_prob_of_a_trained_token_that_is_nan_refuses_the_step() -> None:
    backend = language_policy(MODEL)
    part = samples(backend)
    segment = text(part)
    log_probs = segment.log_probs.clone()
    log_probs[3] = math.nan
    broken = dataclasses.replace(part, segment=dataclasses.replace(segment, log_probs=log_probs))
    before = weights_of(backend)
    report = values(train_text(backend, GRPO(anchor="rollout"), broken, micro_batch_size=1))
    assert report["train/skipped"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_log_ratio_of_200_trains_on_with_finite_weights(log_ratio: float) -> None:
    backend = language_policy(MODEL, reference=True)
    part = samples(backend)
    segment = text(part)
    moved = segment.log_probs.clone()
    moved[::3] -= log_ratio
    far = dataclasses.replace(part, segment=dataclasses.replace(segment, log_probs=moved))
    report = values(train_text(backend, GRPO(anchor="rollout", kl_coef=0.1), far))
    assert report["train/skipped"] == 0.0
    assert math.isfinite(report["train/loss"])
    assert all(bool(torch.isfinite(value).all()) for value in weights_of(backend).values())
