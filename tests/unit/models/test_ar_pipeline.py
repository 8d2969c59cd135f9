"""A request of prompts becomes a Sample filled with text."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tiny_language import PROMPTS, SMALL, OtherLM, prompts_of, questions_of, request, stage_of
from tests.tiny_language_policy import text
from unirl.models.ar_pipeline import ARPipeline
from unirl.models.base import Bundle, TokenStep
from unirl.models.language.attention import DecodeLayout, Layout
from unirl.types.media import Media
from unirl.types.sampling import ARSamplingParams

STOPS = tuple(range(0, 40, 5))


@dataclasses.dataclass(frozen=True)
class Counting(OtherLM):
    """Notes how many tokens each forward reads."""

    read: list[int] = dataclasses.field(default_factory=list)

    def hidden_states(
        self,
        bundle: Bundle,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
        *,
        pictures: list[dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        self.read.append(tokens.numel())
        return OtherLM.hidden_states(self, bundle, tokens, positions, layout, pictures=pictures)

    def token_step(self, bundle: Bundle) -> TokenStep:
        step = OtherLM.token_step(self, bundle)

        def counted(tokens: torch.Tensor, positions: torch.Tensor, layout: DecodeLayout) -> torch.Tensor:
            self.read.append(len(tokens))
            return step(tokens, positions, layout)

        return counted


def test_the_frontier_is_filled_with_texts_tokens_prompts_and_the_version() -> None:
    stage = stage_of(OtherLM())
    sample = ARPipeline(stage)(request(group=2, stop_token_ids=STOPS), version=7)
    part = sample.frontier
    assert part.filled
    assert part.version is not None
    assert part.version.tolist() == [7] * 6
    rows = [row.tolist() for row in text(part).tokens.split(text(part).lengths.tolist())]
    shown = [row[:-1] if row[-1] in (*STOPS, *SMALL.end_tokens(stage.bundle)) else row for row in rows]
    assert part.media is not None
    assert part.media.required_texts == [SMALL.decode(stage.bundle, row) for row in shown]
    expected = SMALL.tokenize(stage.bundle, Media(texts=list(PROMPTS)))
    own = expected.tokens.split(expected.lengths.tolist())
    assert questions_of(part) == [own[row].tolist() for row in (0, 0, 1, 1, 2, 2)]
    assert sample.parts[0] is not None


def test_texts_end_where_their_stop_string_begins_and_tokens_do_not() -> None:
    stage = stage_of(OtherLM())
    free = ARPipeline(stage)(request(group=4), version=0).frontier
    assert free.media is not None
    stop = free.media.required_texts[0][3:5]
    part = ARPipeline(stage)(request(group=4, stop=(stop,)), version=0).frontier
    assert part.media is not None
    assert part.media.required_texts[0] == free.media.required_texts[0].partition(stop)[0]
    assert int(text(part).lengths[0]) == len(part.media.required_texts[0]) + len(stop)
    assert not text(part).truncated[0]


@pytest.mark.parametrize(("batch_size", "prefilled"), [(None, [1]), (2, [1, 1]), (4, [1]), (1, [1] * 4)])
def test_a_prompt_is_read_once_for_all_siblings_of_a_batch(batch_size: int | None, prefilled: list[int]) -> None:
    """A prompt of 30 tokens, 4 siblings: after its prefill a forward reads a token of each row in the batch."""
    family = Counting()
    stage = stage_of(family)
    family.read.clear()
    ARPipeline(stage, batch_size)(request(("a" * 30,), 4, max_new_tokens=5), version=0)
    assert [size for size in family.read if size >= 30] == [30 * size for size in prefilled]
    assert [size for size in family.read if size < 30] == [batch_size or 4] * 4 * len(prefilled)


def test_a_replay_reads_a_prompt_once_and_no_last_token() -> None:
    family = Counting()
    stage = stage_of(family)
    part = ARPipeline(stage)(request(("a" * 30, "b" * 20), 4, stop_token_ids=STOPS), version=0).frontier
    family.read.clear()
    stage.replay(part)
    assert family.read == [50 + int((text(part).lengths - 1).sum())]


def test_equal_texts_of_two_prompts_stay_two_prompts() -> None:
    part = ARPipeline(stage_of(OtherLM()))(request(("ab", "ab"), 2), version=0).frontier
    assert prompts_of(part).lengths.tolist() == [2] * 4
    assert len({tuple(row.tolist()) for row in text(part).tokens.split(12)}) == 4


def test_a_part_that_was_written_survives_being_cut_and_joined() -> None:
    stage = stage_of(OtherLM())
    part = ARPipeline(stage)(request(group=3, top_k=5, stop_token_ids=STOPS), version=0).frontier
    with torch.no_grad():
        whole = stage.replay(part)
        pieces = [stage.replay(piece) for piece in part.split([2, 1, 5, 1])]
        joined = stage.replay(type(part).concat(part.split([2, 1, 5, 1])))
    for name in ("log_probs", "entropy"):
        column = torch.cat([vars(piece)[name] for piece in pieces])
        torch.testing.assert_close(column, vars(whole)[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(vars(joined)[name], vars(whole)[name])


def test_what_is_not_trained_has_log_prob_0_and_no_gradient_in_a_replay() -> None:
    stage = stage_of(OtherLM())
    part = ARPipeline(stage)(request(group=3, top_k=5), version=0).frontier
    segment = text(part)
    mask = torch.arange(len(segment.tokens)) % 3 > 0
    partly = dataclasses.replace(part, segment=dataclasses.replace(segment, loss_mask=mask))
    with torch.no_grad():
        whole, found = stage.replay(part), stage.replay(partly)
    assert torch.equal(found.log_probs == 0, ~mask)
    torch.testing.assert_close(found.log_probs[mask], whole.log_probs[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy[mask], whole.entropy[mask], rtol=1e-5, atol=1e-5)


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_with_what_would_fit() -> None:
    """A context of 20: 12 tokens and 8 more fit, 13 do not."""
    pipeline = ARPipeline(stage_of(dataclasses.replace(SMALL, context=20)))
    assert pipeline(request(("a" * 12, "b"), 2, max_new_tokens=8), version=0).frontier.filled
    told = r"the prompt 'a{12}.*' has 13 tokens: with sampling.max_new_tokens=8 .* context of 20; .* take at most 7"
    with pytest.raises(ValueError, match=told):
        pipeline(request(("b", "a" * 13), 2, max_new_tokens=8), version=0)
    with pytest.raises(ValueError, match=told):
        pipeline.refuse(Media(texts=["b", "a" * 13]), ARSamplingParams(max_new_tokens=8))
