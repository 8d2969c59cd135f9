"""What a token weighs: the named means, in any micro-batches, and what a mask leaves out."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jaxtyping
import pytest
import torch

from tests.unit.algorithms.packed import all_trained, f64, gradient
from unirl.algorithms.losses import bounded_ratio, clipped_surrogate
from unirl.algorithms.token_losses import (
    Aggregation,
    kl_estimate,
    per_sequence,
    per_token,
    sequence_ratio,
    terms,
    token_weights,
    trained_only,
    weighted_sum,
)

AGGREGATIONS: tuple[tuple[Aggregation, int | None], ...] = (
    ("token-mean", None),
    ("seq-mean-token-mean", None),
    ("seq-mean-token-sum-norm", 4),
)
everywhere = pytest.mark.parametrize(("aggregation", "horizon"), AGGREGATIONS)


def mean(
    losses: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    aggregation: Aggregation,
    horizon: int | None = None,
) -> float:
    weights = token_weights(mask, lengths, aggregation, horizon)
    return weighted_sum(losses, weights).item() / terms(mask, lengths, aggregation)


@pytest.mark.parametrize(("losses", "expected"), [((1, 1, 1, 1), (1.0, 1.0, 0.5)), ((2, 1, 1, 1), (1.25, 1.5, 0.625))])
def test_three_means_of_answers_of_1_and_3_tokens(losses: tuple[float, ...], expected: tuple[float, ...]) -> None:
    mask, lengths = all_trained(1, 3)
    found = [mean(f64(*losses), mask, lengths, aggregation, horizon) for aggregation, horizon in AGGREGATIONS]
    assert found == pytest.approx(list(expected), rel=1e-15)


@pytest.mark.parametrize(("aggregation", "loss", "slope"), [("token-mean", 0.5, 0.25), ("seq-mean-token-mean", 0, 0)])
@pytest.mark.parametrize("cuts", [[(0, 2)], [(0, 1), (1, 2)], [(1, 2), (0, 1)]])
def test_token_mean_of_unequal_answers_is_the_same_in_any_micro_batches(
    aggregation: Aggregation, loss: float, slope: float, cuts: list[tuple[int, int]]
) -> None:
    """Lengths 1 and 3, A = +1 and -1, log p = log sigmoid(theta) at 0: (-1 + 3) / 4, and half of it as the slope."""
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    mask, lengths = all_trained(1, 3)
    total, reported = terms(mask, lengths, aggregation), 0.0
    for first, last in cuts:
        own, advantages = lengths[first:last], f64(1, -1)[first:last]
        tokens = int(own.sum())
        new = torch.nn.functional.logsigmoid(theta).expand(tokens)
        ratio = bounded_ratio(new, new.detach())
        losses = clipped_surrogate(ratio, per_token(advantages, own, tokens), 0.2, 0.2)
        part = weighted_sum(losses, token_weights(torch.ones(tokens).bool(), own, aggregation)) / total
        part.backward()
        reported += part.item()
    assert theta.grad is not None
    assert (reported, theta.grad.item()) == pytest.approx((loss, slope), abs=1e-15)


def test_the_reported_loss_of_micro_batches_of_2_and_4_is_their_mean() -> None:
    mask, lengths = all_trained(1)
    weights = token_weights(mask, lengths, "token-mean")
    total = 2 * terms(mask, lengths, "token-mean")
    assert sum(weighted_sum(f64(loss), weights).item() / total for loss in (2, 4)) == 3.0


@everywhere
def test_a_masked_answer_is_in_no_denominator(aggregation: Aggregation, horizon: int | None) -> None:
    """Lengths 2 and 6, the second cut off and masked: 1, or 2 tokens over a horizon of 4; not 2 / 8."""
    mask, lengths = torch.tensor([True] * 2 + [False] * 6), torch.tensor([2, 6])
    expected = 0.5 if horizon else 1.0
    assert mean(torch.ones(8), mask, lengths, aggregation, horizon) == expected


@everywhere
def test_a_step_without_a_trained_token_has_0_terms_and_a_loss_and_gradient_of_0(
    aggregation: Aggregation, horizon: int | None
) -> None:
    new = f64(math.nan, 1, 1e4).requires_grad_()
    mask, lengths = torch.zeros(3, dtype=torch.bool), torch.tensor([1, 2])
    ratio = bounded_ratio(trained_only(new, mask), trained_only(f64(0, math.nan, -1e4), mask))
    loss = weighted_sum(ratio, token_weights(mask, lengths, aggregation, horizon))
    assert terms(mask, lengths, aggregation) == 0.0
    assert loss.item() == 0.0
    assert gradient(loss, new) == [0.0, 0.0, 0.0]


@everywhere
def test_an_answer_of_no_tokens_is_no_term(aggregation: Aggregation, horizon: int | None) -> None:
    mask, lengths = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2, 0])
    assert terms(mask, lengths, aggregation) == (2.0 if aggregation == "token-mean" else 1.0)
    assert token_weights(mask, lengths, aggregation, horizon).sum() == {"token-mean": 2.0}.get(
        aggregation, 2 / (horizon or 2)
    )


@pytest.mark.parametrize("cleaned", [True, False])
def test_a_nan_at_a_masked_token_reaches_neither_loss_nor_gradient_of_cleaned_log_probs(cleaned: bool) -> None:
    """Of others the loss is clean alone: the derivative of `exp` gives 0 x NaN."""
    mask, lengths = torch.tensor([True, False, False]), torch.tensor([3])
    new, old = f64(-1, -1, math.nan).requires_grad_(), f64(-1, math.nan, -1)
    ratio = bounded_ratio(trained_only(new, mask), trained_only(old, mask)) if cleaned else bounded_ratio(new, old)
    loss = weighted_sum(-ratio, token_weights(mask, lengths, "token-mean"))
    assert loss.item() == -1.0
    slopes = gradient(loss, new)
    assert slopes[0] == -1.0
    assert [math.isnan(slope) for slope in slopes[1:]] == [not cleaned] * 2


def test_a_nan_at_a_trained_token_is_not_hidden() -> None:
    mask, lengths = all_trained(2)
    loss = weighted_sum(f64(1, math.nan), token_weights(mask, lengths, "token-mean"))
    assert math.isnan(loss.item())


@pytest.mark.parametrize(
    ("aggregation", "horizon", "message"),
    [
        ("token-mean", 4, "horizon=4 with token-mean"),
        ("seq-mean-token-mean", 4, "horizon=4 with seq-mean-token-mean"),
        ("seq-mean-token-sum-norm", None, "horizon=None"),
        ("seq-mean-token-sum-norm", 0, "at least 1, got 0"),
    ],
)
def test_a_horizon_goes_with_its_aggregation_alone(aggregation: Aggregation, horizon: int | None, message: str) -> None:
    mask, lengths = all_trained(1)
    with pytest.raises(ValueError, match=message):
        token_weights(mask, lengths, aggregation, horizon)


@hypothesis.given(st.data())
def test_no_cut_and_no_order_of_sequences_changes_loss_or_gradient(data: st.DataObject) -> None:
    aggregation, horizon = data.draw(st.sampled_from(AGGREGATIONS))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    total = sum(lengths)
    new = torch.randn(total, generator=generator, dtype=torch.float64)
    old, advantages = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (total, len(lengths)))
    mask = torch.rand(total, generator=generator) < 0.7
    ends = [0, *itertools.accumulate(lengths)]
    denominator = terms(mask, torch.tensor(lengths), aggregation) or 1.0

    def step(micro_batches: list[list[int]]) -> tuple[float, torch.Tensor]:
        leaf, loss = new.clone().requires_grad_(), 0.0
        for rows in micro_batches:
            tokens = torch.tensor([t for row in rows for t in range(ends[row], ends[row + 1])], dtype=torch.long)
            own, kept = torch.tensor([lengths[row] for row in rows]), mask[tokens]
            spread = per_token(advantages[torch.tensor(rows)], own, len(tokens))
            losses = clipped_surrogate(sequence_ratio(leaf[tokens], old[tokens], kept, own), spread, 0.2, 0.3)
            losses = losses + kl_estimate(leaf[tokens], old[tokens], "k3")
            part = weighted_sum(losses, token_weights(kept, own, aggregation, horizon)) / denominator
            part.backward()
            loss += part.item()
        assert leaf.grad is not None
        return loss, leaf.grad

    rows = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(rows) - 1))
    whole, pieces = step([list(range(len(lengths)))]), step([rows[:cut], rows[cut:]])
    assert pieces[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(pieces[1], whole[1], rtol=1e-12, atol=1e-12)


def test_tokens_that_do_not_fit_their_lengths_are_refused() -> None:
    with pytest.raises(RuntimeError, match="lengths"):
        per_sequence(torch.ones(3), torch.tensor([2, 2]))
    with pytest.raises(RuntimeError, match="size"):
        per_token(torch.ones(2), torch.tensor([2, 2]), 3)
    with pytest.raises(jaxtyping.TypeCheckError):
        trained_only(torch.ones(3), torch.ones(2, dtype=torch.bool))
