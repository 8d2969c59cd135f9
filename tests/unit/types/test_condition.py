"""Embeddings and their guidance branches."""

from __future__ import annotations

import pytest
import torch

from unirl.types.condition import Conditions, Embedding


def embedding(count: int, length: int, *, masked: bool) -> Embedding:
    mask = torch.ones(count, length, dtype=torch.bool) if masked else None
    return Embedding(tokens=torch.ones(count, length, 4), pooled=torch.ones(count, 2), mask=mask)


def test_prompts_of_different_length_join_under_a_mask() -> None:
    joined = Embedding.concat([embedding(1, 2, masked=True), embedding(2, 3, masked=True)])
    assert joined.tokens.shape == (3, 3, 4)
    assert joined.mask is not None
    assert joined.mask.tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert joined.tokens[0, 2].tolist() == [0, 0, 0, 0]


def test_prompts_of_different_length_without_a_mask_are_refused() -> None:
    """The model would attend to the padding: a prompt's picture would depend on its neighbours."""
    with pytest.raises(ValueError, match=r"Embedding.tokens: lengths \[2, 3\] cannot be joined without 'mask'"):
        Embedding.concat([embedding(1, 2, masked=False), embedding(2, 3, masked=False)])
    assert Embedding.concat([embedding(1, 2, masked=False), embedding(2, 2, masked=False)]).mask is None


def test_token_ids_are_embeddings_too() -> None:
    assert len(Embedding(tokens=torch.zeros(3, 5, dtype=torch.long))) == 3


def test_a_mask_must_fit_its_tokens() -> None:
    with pytest.raises(ValueError, match="a mask of 4 positions does not fit 3 tokens"):
        Embedding(tokens=torch.ones(1, 3, 4), mask=torch.ones(1, 4, dtype=torch.bool))


def test_both_branches_have_the_same_rows_and_may_differ_in_length() -> None:
    both = Conditions(positive=embedding(2, 5, masked=True), negative=embedding(2, 1, masked=True))
    chosen = both.select([1, 1, 0])
    assert len(chosen.positive) == 3
    assert chosen.negative is not None
    assert len(chosen.negative) == 3
    with pytest.raises(ValueError, match=r"Conditions: fields disagree on the number of rows: \{'positive': 2, 'neg"):
        Conditions(positive=embedding(2, 5, masked=True), negative=embedding(1, 1, masked=True))


def test_a_guided_and_an_unguided_batch_do_not_join() -> None:
    guided = Conditions(positive=embedding(1, 2, masked=True), negative=embedding(1, 1, masked=True))
    with pytest.raises(ValueError, match=r"Conditions\.negative is set in some of the batches to join"):
        Conditions.concat([guided, Conditions(positive=embedding(1, 2, masked=True))])
