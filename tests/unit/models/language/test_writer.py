"""What ends a response, and that a row is the same whatever stands beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.byte_language import END, TURN_END, write_checkpoint
from tests.tiny_language import CPU, SMALL, OtherLM, request, responses_of, stage_of, written
from tests.tiny_language_policy import text
from unirl.models import ar_stage
from unirl.models.ar_pipeline import ARPipeline, read
from unirl.models.ar_stage import ARStage
from unirl.models.base import Bundle
from unirl.models.language.attention import KeyValues
from unirl.models.language.causal_lm import CausalLM
from unirl.models.language.writer import Writer
from unirl.types.media import Media
from unirl.types.sample import Part, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segment import TextSegment

SHARP = OtherLM(init_seed=1)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return CausalLM(checkpoint=str(write_checkpoint(tmp_path_factory.mktemp("bytes"))))


@pytest.fixture(scope="module")
def bundle(family: CausalLM) -> Bundle:
    return family.load(CPU, torch.float32)


def token(bundle: Bundle, *texts: str) -> list[int]:
    """Ids of tokens by their names."""
    return bundle.processors["tokenizer"].convert_tokens_to_ids(list(texts))


def spelled(bundle: Bundle, text: str) -> list[int]:
    """A token for each byte."""
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return token(bundle, *level.pre_tokenize_str(text)[0][0])


def scripted(
    family: CausalLM, bundle: Bundle, rows: list[list[int]], room: int, **settings: Any
) -> tuple[TextSegment, list[int]]:
    """The responses of a model that wants to write `rows`, and how many rows were in the batch at each token."""
    sampling = ARSamplingParams(max_new_tokens=room, **settings)
    writer = Writer([f"r0.p0/{row}" for row in range(len(rows))], sampling, family, bundle)
    batch, sizes = list(range(len(rows))), []
    while True:
        wanted = [rows[row][min(writer.step, len(rows[row]) - 1)] for row in batch]
        logits = torch.full((len(batch), family.vocabulary(bundle)), -torch.inf)
        logits[torch.arange(len(batch)), torch.tensor(wanted)] = 0.0
        sizes.append(len(batch))
        done = writer.write(logits)
        if done:
            return writer.segment(), sizes
        if writer.left is not None:
            batch = [batch[row] for row in writer.left.tolist()]
        assert len(writer.latest) == len(batch)


def rows_of(segment: TextSegment) -> list[list[int]]:
    return [row.tolist() for row in segment.tokens.split(segment.lengths.tolist())]


# What ends a response


def test_each_of_several_end_tokens_ends_its_row_and_is_part_of_it(family: CausalLM, bundle: Bundle) -> None:
    """Two of the model's generation config (one is the tokenizer's), and one of the recipe."""
    end, turn, own, a = token(bundle, END, TURN_END, "z", "a")
    assert family.end_tokens(bundle) == (end, turn)
    rows = [[a, end, a, a], [a, a, turn, a], [own, a, a, a], [a, a, a, a, a]]
    segment, _ = scripted(family, bundle, rows, 4, stop_token_ids=(own,))
    assert rows_of(segment) == [[a, end], [a, a, turn], [own], [a, a, a, a]]
    assert segment.truncated.tolist() == [False, False, False, True]
    assert segment.log_probs.tolist() == [0.0] * 10
    assert segment.loss_mask.all()


def test_an_end_token_in_the_last_place_is_an_end_and_no_truncation(family: CausalLM, bundle: Bundle) -> None:
    end, a = token(bundle, END, "a")
    segment, _ = scripted(family, bundle, [[a, a, end], [a, a, a]], 3)
    assert segment.truncated.tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "stop", "kept", "shown"),
    [
        ("one STOP two", ("STOP",), "one STOP", "one "),
        ("one\n\ntwo", ("\n\n",), "one\n\n", "one"),
        ("naïve café au lait", ("é",), "naïve café", "naïve caf"),
        ("日本語です。はい", ("。",), "日本語です。", "日本語です"),
        ("🙂🙃 ok", ("🙃",), "🙂🙃", "🙂"),
        ("end of 日本", ("本", "of"), "end of", "end "),
        ("aab b", ("ab", "b"), "aab", "a"),
        ("xy", ("x",), "x", ""),
    ],
)
def test_a_stop_string_ends_the_row_with_the_token_that_completes_it(
    family: CausalLM, bundle: Bundle, text: str, stop: tuple[str, ...], kept: str, shown: str
) -> None:
    """A token is a byte here, so each of these crosses the borders of tokens, and of characters."""
    segment, _ = scripted(family, bundle, [spelled(bundle, text)], 99, stop=stop)
    assert rows_of(segment) == [spelled(bundle, kept)]
    assert segment.truncated.tolist() == [False]
    assert read(family, bundle, segment, ARSamplingParams(max_new_tokens=99, stop=stop)) == [shown]


def test_a_stop_string_that_never_comes_leaves_the_text_whole(family: CausalLM, bundle: Bundle) -> None:
    row = spelled(bundle, "nothing here")
    segment, _ = scripted(family, bundle, [row], len(row), stop=("NOTHING", "hereafter"))
    assert rows_of(segment) == [row]
    assert segment.truncated.tolist() == [True]
    assert read(family, bundle, segment, ARSamplingParams(max_new_tokens=99, stop=("NOTHING",))) == ["nothing here"]


def test_a_stop_string_inside_of_one_token_ends_the_row_with_that_token(family: CausalLM, bundle: Bundle) -> None:
    (abc, z) = token(bundle, "abc", "z")
    segment, _ = scripted(family, bundle, [[z, abc, z]], 3, stop=("b",))
    assert rows_of(segment) == [[z, abc]]
    assert read(family, bundle, segment, ARSamplingParams(max_new_tokens=3, stop=("b",))) == ["za"]


def test_tokens_stay_what_was_drawn_where_their_text_would_be_read_as_others(family: CausalLM, bundle: Bundle) -> None:
    a, b, ab, end = token(bundle, "a", "b", "ab", END)
    tokenizer = bundle.processors["tokenizer"]
    segment, _ = scripted(family, bundle, [[a, b, end]], 8)
    [text] = read(family, bundle, segment, ARSamplingParams(max_new_tokens=8))
    assert text == "ab"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [ab]
    assert rows_of(segment) == [[a, b, end]]


@pytest.mark.parametrize(
    ("row", "settings", "kept", "shown"),
    [
        (["4", "2", "</s>", "z"], {"stop": ("</s>",)}, 3, "42"),
        (["4", "2", "</s>", "z"], {"stop": ("z", "</s>")}, 3, "42"),
        (["4", "<", "/", "s", ">", "z"], {"stop": ("</s>",)}, 5, "4"),
        (["4", "2", "z", "9"], {"stop_token_ids": True}, 3, "42"),
        (["4", "2", TURN_END, "9"], {}, 3, "42"),
        (["4", "2", "z", "9"], {"stop_token_ids": True, "stop": ("2z",)}, 3, "4"),
    ],
)
def test_the_text_lacks_what_ended_it_a_special_token_an_ordinary_one_or_a_string(
    family: CausalLM, bundle: Bundle, row: list[str], settings: dict[str, Any], kept: int, shown: str
) -> None:
    """`stop_token_ids` holds the ordinary token "z"."""
    settings = {**settings, **({"stop_token_ids": tuple(token(bundle, "z"))} if "stop_token_ids" in settings else {})}
    segment, _ = scripted(family, bundle, [token(bundle, *row)], len(row), **settings)
    assert rows_of(segment) == [token(bundle, *row[:kept])]
    assert segment.truncated.tolist() == [False]
    assert read(family, bundle, segment, ARSamplingParams(max_new_tokens=9, **settings)) == [shown]


def test_a_stop_string_with_a_special_token_within_it_is_refused(family: CausalLM, bundle: Bundle) -> None:
    sampling = ARSamplingParams(max_new_tokens=4, stop=("z", "</s>\n"))
    told = r"stop holds '</s>\\n', which no text has: '</s>' is a special token.*stop at '</s>' alone"
    with pytest.raises(ValueError, match=told):
        Writer(["r0.p0/0"], sampling, family, bundle)
    with pytest.raises(ValueError, match=told):
        ARPipeline(ARStage(family, bundle, torch.float32)).refuse(Media(texts=["a"]), sampling)


# Who is in the batch


def test_rows_that_have_ended_leave_once_they_cost_more_than_a_quarter_of_a_forward(
    family: CausalLM, bundle: Bundle
) -> None:
    end, a = token(bundle, END, "a")
    rows = [[a] * length + [end] for length in (1, 2, 3, 3, 3, 5, 5, 5)]
    segment, sizes = scripted(family, bundle, rows, 9)
    assert rows_of(segment) == rows
    assert sizes == [8, 8, 8, 6, 3, 3]


def test_memory_grows_with_what_is_written_and_the_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARP ends its rows at different lengths; room for 2 tokens, then 4, 8, 16 ... up to 99."""
    stage, rooms = stage_of(SHARP), set()
    asked = request(group=3, max_new_tokens=100)
    whole = written(stage, asked)
    reserve = KeyValues.reserve

    def watched(cache: KeyValues, room: int, most: int) -> None:
        reserve(cache, room, most)
        rooms.add(cache.keys[0].shape[2] - cache.start)
        assert most == 99

    monkeypatch.setattr(ar_stage, "_FIRST_ROOM", 2)
    monkeypatch.setattr(KeyValues, "reserve", watched)
    part = written(stage, asked)
    assert torch.equal(text(part).tokens, text(whole).tokens)
    assert torch.equal(text(part).log_probs, text(whole).log_probs)
    longest = int(text(part).lengths.max())
    assert rooms == {room for room in (2, 4, 8, 16, 32, 64, 99) if room < 2 * (longest - 1)}


def test_all_rows_of_one_token(family: CausalLM, bundle: Bundle) -> None:
    (end,) = token(bundle, END)
    segment, sizes = scripted(family, bundle, [[end]] * 3, 9)
    assert rows_of(segment) == [[end]] * 3
    assert sizes == [3]


def test_the_support_is_recorded_for_every_token_of_every_row() -> None:
    part = written(stage_of(SHARP), request(group=3, top_p=0.8, top_k=9, stop_token_ids=tuple(range(0, 40, 5))))
    segment = text(part)
    assert segment.support is not None
    assert segment.support_sizes is not None
    assert len(segment.lengths.unique()) > 1
    kept = segment.support.split(segment.support_sizes.tolist())
    assert len(kept) == len(segment.tokens)
    assert all(bool((own == drawn).any()) for own, drawn in zip(kept, segment.tokens, strict=True))
    assert 1 <= int(segment.support_sizes.min()) <= int(segment.support_sizes.max()) <= 9
    assert len(segment.support_sizes.unique()) > 2


def test_at_temperature_0_there_is_one_text_and_nothing_to_train_on() -> None:
    part = written(stage_of(SHARP), request(group=2, temperature=0.0, top_p=0.5))
    rows = responses_of(part)
    assert rows[0::2] == rows[1::2]
    assert text(part).support is None
    assert not text(part).log_probs.any()


# Independence


def by_id(part: Part) -> dict[str, list[int]]:
    return dict(zip(part.ids, responses_of(part), strict=True))


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "top_k": 12}])
def test_a_row_alone_in_any_batch_and_in_any_order_is_the_same_row(settings: dict[str, Any]) -> None:
    stage = stage_of(SHARP)
    asked = request(group=3, stop_token_ids=tuple(range(0, 40, 5)), **settings)
    whole = written(stage, asked)
    expected, log_probs = by_id(whole), dict(zip(whole.ids, log_probs_of(whole), strict=True))
    assert len({tuple(row) for row in expected.values()}) > 5
    for size in (1, 2, 4):
        found = written(stage, asked, size)
        assert by_id(found) == expected
        for name, column in zip(found.ids, log_probs_of(found), strict=True):
            torch.testing.assert_close(column, log_probs[name], rtol=1e-5, atol=1e-5)
    roots, part = asked.parts
    turned = Sample((roots.select([2, 0, 1]), part.select([8, 6, 7, 1, 0, 2, 5, 4, 3])))
    assert by_id(written(stage, turned)) == expected


def log_probs_of(part: Part) -> list[torch.Tensor]:
    return list(text(part).log_probs.split(text(part).lengths.tolist()))


def test_seed_0_is_a_seed_and_rows_rollouts_and_seeds_have_draws_of_their_own() -> None:
    stage = stage_of(SMALL)
    first = written(stage, request(("ab",), 4, seed=0))
    assert responses_of(first) == responses_of(written(stage, request(("ab",), 4, seed=0)))
    assert len({tuple(row) for row in responses_of(first)}) == 4
    for other in (request(("ab",), 4, seed=1), request(("ab",), 4, seed=0, number=1)):
        assert not {tuple(row) for row in responses_of(written(stage, other))} & {
            tuple(row) for row in responses_of(first)
        }
    twice = written(stage, request(("ab", "ab"), 2, seed=0))
    assert len({tuple(row) for row in responses_of(twice)}) == 4


def test_a_longer_limit_continues_the_same_texts() -> None:
    stage = stage_of(SMALL)
    short, long = (responses_of(written(stage, request(group=2, max_new_tokens=n))) for n in (5, 11))
    assert [row[:5] for row in long] == short
    assert max(map(len, long)) == 11


def test_one_new_token_is_drawn_without_a_cache() -> None:
    part = written(stage_of(SMALL), request(group=2, max_new_tokens=1))
    segment = text(part)
    assert segment.lengths.tolist() == [1] * 6
    assert math.isfinite(float(segment.log_probs.sum()))
