from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.supervised_language import PAIRS, conversations, encoded
from tests.tiny_language import SMALL
from tests.tiny_language_policy import language_policy, text
from unirl.data.conversations import as_conversations
from unirl.rollout.supervised_text import ConversationEncoder, Survey, TokenLimit
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.condition import PromptTokens

END = len(SMALL.characters)


@pytest.fixture(scope="module")
def backend() -> FSDPBackend:
    return language_policy(SMALL)


def surveyed(backend: FSDPBackend, limit: TokenLimit) -> Survey:
    return ConversationEncoder(backend, limit).survey(as_conversations(conversations(*PAIRS), 0))


def test_a_conversation_becomes_a_prompt_and_a_response_that_starts_at_the_first_trained_token(
    backend: FSDPBackend,
) -> None:
    part = encoded(backend, ("12", "3"), ("0", "45"))
    segment, prompts = text(part), part.conditions
    assert isinstance(prompts, PromptTokens)
    assert (prompts.tokens.tolist(), prompts.lengths.tolist()) == ([1, 2, 0], [2, 1])
    assert segment.tokens.tolist() == [3, END, 4, 5, END]
    assert segment.lengths.tolist() == [2, 3]
    assert segment.loss_mask.all()
    assert not segment.truncated.any()
    assert part.ids == ["r0.p0", "r0.p1"]


def test_the_survey_tells_lengths_before_anything_is_trained(backend: FSDPBackend) -> None:
    found = surveyed(backend, TokenLimit())
    assert found.prompts.tolist() == [len(prompt) for prompt, _ in PAIRS]
    assert found.lengths.tolist() == [len(prompt) + len(response) + 1 for prompt, response in PAIRS]
    assert found.ends.all()


def test_too_long_is_an_error_that_names_the_first_one(backend: FSDPBackend) -> None:
    limit = TokenLimit(max_tokens=12)
    with pytest.raises(
        ValueError, match=r"2 of 5 conversations have more than max_tokens=12 tokens, conversation 2 has 13"
    ):
        surveyed(backend, limit).kept(limit)
    assert surveyed(backend, limit).kept(TokenLimit(max_tokens=30)).tolist() == [0, 1, 2, 3, 4]


def test_too_long_can_be_dropped(backend: FSDPBackend) -> None:
    limit = TokenLimit(max_tokens=12, too_long="drop")
    assert surveyed(backend, limit).kept(limit).tolist() == [0, 2, 3]


def test_truncation_keeps_the_prompt_and_the_start_of_the_response_and_never_leaves_it_empty(
    backend: FSDPBackend,
) -> None:
    limit = TokenLimit(max_tokens=9, too_long="truncate")
    kept = surveyed(backend, limit).kept(limit).tolist()
    assert kept == [0, 2, 3, 4]  # the prompt of the second fills all 9 tokens
    part = encoded(backend, *(PAIRS[row] for row in kept), limit=limit)
    whole = encoded(backend, *(PAIRS[row] for row in kept))
    assert text(part).lengths.tolist() == [2, 8, 4, 2]
    assert text(part).truncated.tolist() == [False, False, False, True]
    for cut, full in zip(part.split([1] * 4), whole.split([1] * 4), strict=True):
        count = len(text(cut).tokens)
        assert torch.equal(text(cut).tokens, text(full).tokens[:count])


@pytest.mark.parametrize("most", [None, 12, 13])
def test_without_a_lower_limit_the_models_context_is_the_limit(most: int | None) -> None:
    """PAIRS have 6, 13, 9, 9 and 26 tokens."""
    short = language_policy(dataclasses.replace(SMALL, context=12))
    limit, own = TokenLimit(max_tokens=most), "max_tokens=12" if most == 12 else "the model's context of 12"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        surveyed(short, limit).kept(limit)
    assert str(caught.value) == (
        f"2 of 5 conversations have more than {own} tokens, conversation 2 has 13: shorten what is longer, or set "
        "data.limit={max_tokens: 12, too_long: drop} (or truncate)"
    )


def test_what_is_longer_than_the_models_context_is_dropped_or_truncated_where_that_is_asked_for() -> None:
    short = language_policy(dataclasses.replace(SMALL, context=12))
    dropped = TokenLimit(max_tokens=100, too_long="drop")
    assert surveyed(short, dropped).kept(dropped).tolist() == [0, 2, 3]
    cut = TokenLimit(max_tokens=100, too_long="truncate")
    assert surveyed(short, cut).kept(cut).tolist() == [0, 1, 2, 3, 4]
    assert text(encoded(short, *PAIRS, limit=cut)).lengths.tolist() == [2, 3, 8, 4, 5]


def test_a_conversation_that_the_model_cannot_be_shown_is_named(backend: FSDPBackend) -> None:
    with pytest.raises(ValueError, match="the conversation that starts with 'HELLO': the prompt 'HELLO' must be of"):
        encoded(backend, ("a", "b"), ("HELLO", "b"))


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens must be at least 2 .* or null, got 1"):
        TokenLimit(max_tokens=1)
    with pytest.raises(ValueError, match="too_long=drop needs max_tokens"):
        TokenLimit(too_long="drop")
