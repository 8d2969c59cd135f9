"""One token of each row: what is drawn, how often, and with which log-prob."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from unirl.models.language.draw import draw, likeliest, uniforms
from unirl.types.sampling import ARSamplingParams

BELOW_1 = math.nextafter(1.0, 0.0)
# The 1 - 1e-6 quantile of chi-square, by degrees of freedom.
CHI_SQUARE = {1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 9: 45.08}


def sampling(**settings: Any) -> ARSamplingParams:
    return ARSamplingParams(max_new_tokens=4, **settings)


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


# The distribution


def test_the_tempered_log_prob_in_numbers() -> None:
    """Logits 2 1 0 at T = 0.5, token 0: neither that of T = 1 (-0.4076060) nor half of it (-0.8152119)."""
    drawn = draw(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, dtype=torch.float64), sampling(temperature=0.5))
    assert drawn.tokens.tolist() == [0]
    assert drawn.log_probs.item() == pytest.approx(-0.1429316, abs=1e-6)


def test_under_top_p_log_probs_are_those_of_the_kept_tokens() -> None:
    """0.5 0.3 0.15 0.05 at top-p 0.75 keeps two: token 1 has 0.3 / 0.8, not 0.3 (-1.2039728)."""
    drawn = draw(log(0.5, 0.3, 0.15, 0.05)[None], torch.tensor([0.9], dtype=torch.float64), sampling(top_p=0.75))
    assert drawn.kept is not None
    assert drawn.kept.tolist() == [[True, True, False, False]]
    assert drawn.tokens.tolist() == [1]
    assert drawn.log_probs.item() == pytest.approx(-0.9808293, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1, 0.0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30, 0.0]),
        ({"temperature": 2.0, "top_k": 2}, [2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0.0, 0.0, 0.0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0.0, 0.0, 0.0]),
        ({"top_p": 0.85, "top_k": 3}, [4 / 9, 3 / 9, 2 / 9, 0.0, 0.0]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(settings: dict[str, Any], expected: list[float]) -> None:
    """Chi-square over 50,000 draws of a fixed seed; a token without probability is never drawn."""
    count = 50_000
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = log(0.4, 0.3, 0.2, 0.1, 0.0).expand(count, -1)
    drawn = draw(logits, uniform, sampling(**settings))
    observed, wanted = drawn.tokens.bincount(minlength=5).double(), count * torch.tensor(expected).double()
    possible = wanted > 0
    assert int(observed[~possible].sum()) == 0
    statistic = float(((observed - wanted)[possible] ** 2 / wanted[possible]).sum())
    assert statistic < CHI_SQUARE[int(possible.sum()) - 1]
    torch.testing.assert_close(drawn.log_probs.exp(), torch.tensor(expected)[drawn.tokens], rtol=1e-5, atol=1e-7)


def test_the_draws_of_samples_are_uniform_and_those_of_two_samples_or_seeds_differ() -> None:
    ids = [f"r0.p0/{row}" for row in range(2000)]
    settings = ARSamplingParams(max_new_tokens=10, seed=0)
    found = uniforms(ids, settings)
    assert found.shape == (2000, 10)
    counts = (found.flatten() * 10).long().bincount(minlength=10).double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < CHI_SQUARE[9]
    assert len(found.unique()) == 20_000
    assert torch.equal(found[7:9], uniforms(ids[7:9], settings))
    seeded = uniforms(ids, ARSamplingParams(max_new_tokens=10, seed=1))
    assert float((seeded == found).double().mean()) == 0.0
    # A longer response has the same draws first.
    assert torch.equal(uniforms(ids[:1], ARSamplingParams(max_new_tokens=20, seed=0))[:, :10], found[:1])


# Edges of the inverse distribution function


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, BELOW_1])
def test_a_token_without_probability_is_never_drawn_at_any_edge(uniform: float) -> None:
    """Tokens 0, 2 and 4 have none: before the first, between two, and after the last one that has some."""
    drawn = draw(log(0.0, 0.5, 0.0, 0.5, 0.0)[None], torch.tensor([uniform], dtype=torch.float64), sampling())
    assert drawn.tokens.item() == (1 if uniform < 0.5 else 3)
    assert drawn.log_probs.item() == pytest.approx(math.log(0.5))


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40), st.floats(0, BELOW_1))
def test_what_is_drawn_is_in_the_vocabulary_and_has_probability(row: list[float], uniform: float) -> None:
    logits = torch.tensor([row])
    drawn = draw(logits, torch.tensor([uniform], dtype=torch.float64), sampling())
    token = int(drawn.tokens)
    assert 0 <= token < len(row)
    assert float(logits.softmax(-1)[0, token]) > 0
    assert math.isfinite(float(drawn.log_probs))


def test_in_a_large_vocabulary_the_token_at_each_quantile_is_the_right_one() -> None:
    """200,000 equal tokens: in float32 sums of 5e-6 would drift by whole tokens."""
    size = 200_000
    wanted = torch.tensor([0, 1, 12_345, 199_998, 199_999])
    uniform = (wanted.double() + 0.5) / size
    drawn = draw(torch.zeros(len(wanted), size), uniform, sampling())
    assert drawn.tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize("vocabulary", [511, 512, 513, 1000, 4096])
def test_a_row_draws_the_same_token_in_any_batch_and_chunk_of_the_vocabulary(vocabulary: int) -> None:
    draws = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(400, vocabulary, generator=draws)
    uniform = torch.rand(400, dtype=torch.float64, generator=draws)
    together = draw(logits, uniform, sampling())
    expected = torch.searchsorted(logits.double().softmax(-1).cumsum(-1), uniform[:, None], right=True)[:, 0]
    assert torch.equal(together.tokens, expected)
    alone = [draw(logits[row : row + 1], uniform[row : row + 1], sampling()) for row in range(20)]
    assert torch.equal(torch.cat([own.tokens for own in alone]), together.tokens[:20])
    assert torch.equal(torch.cat([own.log_probs for own in alone]), together.log_probs[:20])


def test_a_rare_token_of_a_large_vocabulary_is_drawn_as_often_as_its_mass_says() -> None:
    """One token of 1/2, and 150,000 that share the rest: half of the draws are in the tail, evenly."""
    size, count = 150_001, 200
    logits = torch.zeros(size)
    logits[0] = math.log(size - 1)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(logits.expand(count, -1), uniform, sampling()).tokens
    assert int((tokens == 0).sum()) == count // 2
    tail = tokens[count // 2 :].double()
    torch.testing.assert_close(tail, (uniform[count // 2 :] - 0.5) * 2 * (size - 1), rtol=0, atol=1.5)


# Temperature 0, NaN


def test_temperature_0_takes_the_likeliest_token_and_records_no_support() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    drawn = draw(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), sampling(temperature=0.0, top_k=2))
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.log_probs.tolist() == [0.0, 0.0]
    assert drawn.kept is None


def test_log_probs_are_finite_at_the_lowest_temperature_and_a_lower_one_is_refused() -> None:
    """Logits as far apart as a model of half precision can have them."""
    drawn = draw(torch.tensor([[65504.0, -65504.0, 65503.0]]), torch.zeros(1).double(), sampling(temperature=1e-3))
    assert (drawn.tokens.tolist(), drawn.log_probs.tolist()) == ([0], [0.0])
    for temperature in (9e-4, 1e-38, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"must be 0 \(the likeliest token\) or at least 0.001, got"):
            sampling(temperature=temperature)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 2}])
def test_logits_that_are_nan_give_a_log_prob_that_is_nan_and_a_token_of_the_vocabulary(
    settings: dict[str, Any],
) -> None:
    """A NaN is not hidden: the optimizer step that trains on it is refused and counted."""
    logits = torch.tensor([[math.nan] * 3, [0.0, 1.0, 2.0]])
    drawn = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), sampling(**settings))
    assert 0 <= int(drawn.tokens[0]) < 3
    assert math.isnan(float(drawn.log_probs[0]))
    assert math.isfinite(float(drawn.log_probs[1]))


# What is kept


def test_ties_at_the_k_th_place_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert likeliest(logits, 2, 1.0).tolist() == [[True, False, True, True, False]]
    assert likeliest(logits, 1, 1.0).tolist() == [[True, False, False, False, False]]
    assert likeliest(logits, 5, 1.0).all()
    assert likeliest(logits, 50, 1.0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.3, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.874, 3), (0.876, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_that_has_the_probability(top_p: float, kept: int) -> None:
    """1/2 1/4 1/8 1/8: the token that crosses the border is in."""
    assert int(likeliest(log(0.5, 0.25, 0.125, 0.125)[None], 0, top_p).sum()) == kept


@pytest.mark.parametrize("top_p", [1e-6, 0.1])
def test_the_likeliest_token_is_always_kept(top_p: float) -> None:
    assert likeliest(torch.zeros(1, 100), 0, top_p).sum() >= 1
    assert likeliest(log(0.2, 0.7, 0.1)[None], 0, top_p).tolist() == [[False, True, False]]


@pytest.mark.parametrize("top_k", [0, 1, 7, 40, 64])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
def test_it_is_the_set_that_transformers_keeps(top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    ids: Any = torch.zeros(200, 1, dtype=torch.long)
    theirs: Any = logits
    if top_k:
        theirs = TopKLogitsWarper(top_k)(ids, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(ids, theirs)
    assert torch.equal(likeliest(logits, top_k, top_p), theirs > -torch.inf)
