from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unirl.data.conversations import (
    ConversationSampler,
    ConversationSource,
    HubConversations,
    JsonConversations,
    ParquetConversations,
)
from unirl.types.conversation import Conversation, Message

PAIR = {"prompt": "1+1?", "response": "2"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
}
READ = (
    (Message("user", ("1+1?",)), Message("assistant", ("2",))),
    (Message("system", ("Be brief.",)), Message("user", ("1+1?",)), Message("assistant", ("2",))),
)


def lines(folder: Path, *rows: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def table(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def as_json(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> ConversationSource:
    return JsonConversations(path=lines(folder, *map(json.dumps, rows)), **settings)


def as_parquet(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> ConversationSource:
    return ParquetConversations(path=table(folder, rows), **settings)


def as_hub(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> ConversationSource:
    (folder / "set").mkdir()
    table(folder / "set", rows)
    return HubConversations(dataset=str(folder / "set"), **settings)


Stored = Callable[..., ConversationSource]
kinds = pytest.mark.parametrize("stored", [as_json, as_parquet, as_hub])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets are not cached outside of the test, and no hub is asked."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@kinds
def test_prompts_with_responses_and_chats_are_conversations(stored: Stored, tmp_path: Path) -> None:
    for number, (row, expected) in enumerate(zip((PAIR, CHAT), READ, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert stored(folder, [row, row]).rows() == (expected, expected)


@kinds
def test_columns_of_other_names_are_named_in_the_recipe_and_further_ones_are_left(
    stored: Stored, tmp_path: Path
) -> None:
    rows = [{"question": "1+1?", "completion": "2", "source": "school"}]
    names = {"prompt": "question", "response": "completion"}
    assert stored(tmp_path, rows, columns=names).rows() == READ[:1]


@pytest.mark.parametrize("first", ["completion", "response"])
def test_the_column_named_is_read_whatever_its_row_holds_beside_it_and_in_which_order(
    first: str, tmp_path: Path
) -> None:
    row = {"prompt": "1+1?", "completion": "2", "response": "wrong"}
    ordered = {key: row[key] for key in sorted(row, key=lambda key: key != first)}
    assert as_json(tmp_path, [ordered], columns={"response": "completion"}).rows() == READ[:1]
    swapped = {"prompt": "2", "response": "1+1?"}
    names = {"prompt": "response", "response": "prompt"}
    assert as_json(tmp_path, [swapped], columns=names).rows() == READ[:1]


@kinds
def test_a_column_that_is_named_and_not_there_is_an_error_with_those_there_are(stored: Stored, tmp_path: Path) -> None:
    told = r":1: the row has no column 'completion', which is to be its response \(columns: \['prompt', 'response'\]"
    with pytest.raises(ValueError, match=told):
        stored(tmp_path, [PAIR, PAIR], columns={"response": "completion"}).rows()


def test_one_column_for_two_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns takes one column for two things: \{'prompt': 'text', 'response'"):
        as_json(tmp_path, [PAIR], columns={"prompt": "text", "response": "text"})


@kinds
def test_a_malformed_row_is_an_error_with_its_number(stored: Stored, tmp_path: Path) -> None:
    rows = [PAIR, {"prompt": "2+2?", "response": None}, PAIR]
    with pytest.raises(ValueError, match=r":2: a row has strings 'prompt' and 'response', or a list 'messages' \(got"):
        stored(tmp_path, rows).rows()


@kinds
def test_malformed_rows_up_to_a_share_are_skipped_and_counted(
    stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [PAIR, {"prompt": "2+2?", "response": None}, PAIR, {"prompt": "", "response": "x"}]
    with caplog.at_level(logging.WARNING):
        assert stored(tmp_path, rows, max_bad_share=0.5).rows() == (READ[0], READ[0])
    assert "'the prompt is empty': 1" in caplog.text
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="2 bad rows in all"):
        stored(other, rows, max_bad_share=0.4).rows()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "response": ', "not valid JSON"),
        ("[]", "a row must be a JSON object"),
        ('"x"', "a row must be a JSON object"),
        ('{"response": "b"}', "a row has strings 'prompt' and 'response', or a list 'messages'"),
        ('{"prompt": null, "response": "b"}', "a row has strings 'prompt' and 'response', or a list 'messages'"),
        ("", "the line is blank"),
        ('{"prompt": "a", "prompt": "b", "response": "c"}', "a key stands twice"),
        ('{"prompt": "a", "response": "c", "weight": NaN}', "not a JSON number"),
    ],
)
def test_each_way_of_a_broken_line_is_told_with_path_and_physical_line_and_counted_when_skipped(
    line: str, reason: str, tmp_path: Path
) -> None:
    path = lines(tmp_path, json.dumps(PAIR), line, json.dumps(CHAT))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        JsonConversations(path=path)
    assert str(caught.value).startswith(f"{path}:2: {reason}")
    source = JsonConversations(path=path, max_bad_share=0.4)
    assert source.rows() == READ
    [(counted, number)] = source.skipped().items()
    assert (counted.startswith(reason.partition(" (")[0]), number) == (True, 1)


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "a row has strings"),
        ({**PAIR, **CHAT}, "the row has both 'messages' and 'prompt' or 'response'"),
        ({**PAIR, "tools": [{"name": "add"}]}, "the row has 'tools', which are not passed to chat templates"),
        ({"messages": ["hi"]}, "a turn is an object with 'role' and 'content'"),
        (
            {"messages": [turn("bot", "hi")]},
            r"the role of a turn is one of system, user, assistant, tool \(got 'bot'\)",
        ),
        ({"messages": [turn("user", 3)]}, r"the content of a turn is text or a list \(got int\)"),
        ({"messages": [turn("user", None)]}, "a turn without 'content' needs 'tool_calls'"),
        ({"messages": [turn("user", "a", weight=1)]}, r"a turn has keys that no chat template reads \(\['weight'\]"),
        ({"messages": [turn("user", "a")]}, "no turn is the assistant's"),
        ({"messages": [turn("assistant", "a")]}, "the first turn is the assistant's"),
        ({"messages": [turn("user", "a"), turn("system", "b"), turn("assistant", "c")]}, "a system turn comes first"),
        ({"prompt": "a", "response": ""}, "a turn of the assistant is empty: there is nothing to learn from it but"),
        ({"prompt": "a", "response": " \n"}, "a turn of the assistant is empty"),
        ({"messages": [turn("user", "a"), turn("assistant", [])]}, "a turn of the assistant is empty"),
        ({"messages": [turn("user", "a"), turn("assistant", None, tool_calls=[])]}, "a turn of the assistant is"),
        ({"messages": [turn("user", [{"type": "audio"}])]}, "a piece of content is a text, or an image"),
        ({"messages": [turn("user", [{"type": "image", "image": "no.png"}])]}, "there is no such picture"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f":1: {reason}"):
        as_json(tmp_path, [row])


def test_pictures_keep_their_place_among_texts_and_are_paths_beside_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "red.png")
    content = [
        {"type": "text", "text": "Is "},
        {"type": "image", "image": "red.png"},
        {"type": "text", "text": " red?"},
    ]
    [conversation] = as_json(tmp_path, [{"messages": [turn("user", content), turn("assistant", "yes")]}]).rows()
    assert conversation[0].content == ("Is ", tmp_path / "red.png", " red?")
    assert (conversation[0].text, conversation[0].pictures) == ("Is  red?", (tmp_path / "red.png",))


def test_calls_of_tools_travel_with_their_turn(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [turn("user", "1+1?"), turn("assistant", None, tool_calls=calls), turn("tool", "2", name="add")]
    [conversation] = as_json(tmp_path, [{"messages": [*turns, turn("assistant", "2")]}]).rows()
    assert conversation[1] == Message("assistant", (), {"tool_calls": calls})
    assert conversation[2] == Message("tool", ("2",), {"name": "add"})


def test_an_empty_source_is_never_empty_without_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no usable conversation"):
        JsonConversations(path=lines(tmp_path))
    with pytest.raises(ValueError, match=r"holds no usable conversation: .*:1: not valid JSON"):
        JsonConversations(path=lines(tmp_path, "{"), max_bad_share=0.9)


def test_what_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    for source in (JsonConversations, ParquetConversations):
        with pytest.raises(ValueError, match="there is no file of conversations"):
            source(path=tmp_path / "none")
    with pytest.raises(ValueError, match="columns names messages, prompt and response, not"):
        JsonConversations(path=lines(tmp_path, json.dumps(PAIR)), columns={"promt": "a"})
    with pytest.raises(ValueError, match=r"max_bad_share must be in \[0, 1\), got 1"):
        JsonConversations(path=lines(tmp_path, json.dumps(PAIR)), max_bad_share=1)
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        ParquetConversations(path=lines(tmp_path, json.dumps(PAIR))).rows()
    with pytest.raises(ValueError, match=r"data set .*, split test: "):
        as_hub(tmp_path, [PAIR], split="test").rows()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"this source needs pyarrow: pip install 'unirl\[parquet\]'"):
        ParquetConversations(path=lines(tmp_path, ""))
    with pytest.raises(ValueError, match=r"this source needs datasets: pip install 'unirl\[datasets\]'"):
        HubConversations(dataset="a/b")


# Batches


def numbered(count: int) -> tuple[Conversation, ...]:
    return tuple((Message("user", (f"{i}",)), Message("assistant", ("x",))) for i in range(count))


def drawn(sampler: ConversationSampler, batch: int) -> list[str]:
    media = sampler.draw(batch).media
    assert media is not None
    assert media.conversations is not None
    return [conversation[0].text for conversation in media.conversations]


def test_every_conversation_is_drawn_once_an_epoch_and_a_batch_does_not_depend_on_those_before() -> None:
    sampler = ConversationSampler(numbered(10), count=4, seed=0)
    texts = [text for batch in range(5) for text in drawn(sampler, batch)]
    assert sorted(texts[:10]) == sorted(texts[10:]) == [f"{i}" for i in range(10)]
    assert texts[:10] != texts[10:]
    assert drawn(ConversationSampler(numbered(10), count=4, seed=0), 3) == texts[12:16]
    assert sampler.draw(2).ids == ["r2.p0", "r2.p1", "r2.p2", "r2.p3"]


@pytest.mark.parametrize("count", [0, 4])
def test_a_batch_larger_than_the_data_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={count} does not fit the 3 conversations: take 1 to 3"):
        ConversationSampler(numbered(3), count=count, seed=0)
