from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from unirl.data.prompts import FilePrompts, ListedPrompts, PromptRow, PromptSampler, as_roots, epoch_rows
from unirl.types.reward import Scores
from unirl.types.sample import Part, Sample
from unirl.types.sampling import DiffusionSamplingParams

GOOD = '{"prompt": "a cat", "answer": 3}'
# The malformed rows of a prompt file, and what is said of each.
BAD = {
    '{"prompt": "a c': "not valid JSON",
    "[]": "a row must be a JSON object, got list",
    '"x"': "a row must be a JSON object, got str",
    '{"text": "a cat"}': "the row has no 'prompt' (keys: ['text'])",
    '{"prompt": null}': "the prompt must be a string (got NoneType)",
    '{"prompt": 7}': "the prompt must be a string (got int)",
    '{"prompt": "  "}': "the prompt is empty",
    "": "the line is blank",
    '{"prompt": "a", "prompt": "b"}': "a key stands twice (['prompt'])",
    '{"prompt": "a", "answer": NaN}': "not a JSON number (NaN)",
}
SAMPLING = DiffusionSamplingParams(steps=2, height=8, width=8)


def rows_of(count: int) -> tuple[PromptRow, ...]:
    return tuple(PromptRow(f"prompt {row}") for row in range(count))


def texts(part: Part) -> list[str]:
    assert part.media is not None
    assert part.media.texts is not None
    return part.media.texts


def prompt_file(folder: Path, *lines: str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# Files


def test_a_jsonl_row_is_its_prompt_and_everything_else_as_metadata(tmp_path: Path) -> None:
    source = FilePrompts(prompt_file(tmp_path, GOOD, '{"prompt": " a dog "}'))
    assert source.rows() == (PromptRow("a cat", {"answer": 3}), PromptRow(" a dog ", {}))
    assert source.skipped() == {}


def test_a_text_row_is_the_stripped_line(tmp_path: Path) -> None:
    source = FilePrompts(prompt_file(tmp_path, " a cat", "a dog ", name="prompts.txt"))
    assert source.rows() == (PromptRow("a cat"), PromptRow("a dog"))


def test_a_name_without_a_suffix_is_a_text_file(tmp_path: Path) -> None:
    assert FilePrompts(prompt_file(tmp_path, "a cat", name="prompts")).rows() == (PromptRow("a cat"),)


@pytest.mark.parametrize("name", ["prompts.csv", "prompts.json", "prompts.JSONL", "prompts.parquet"])
def test_a_file_that_is_neither_text_nor_json_lines_is_refused_with_what_is_read(tmp_path: Path, name: str) -> None:
    path = prompt_file(tmp_path, GOOD, name=name)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        FilePrompts(path)
    assert str(caught.value) == (
        'prompts are read from a .jsonl file, an object such as {"prompt": "a cat"} a line, or from a .txt file, a '
        f"prompt a line: {path} is neither; write it as one of them"
    )


def test_a_prompt_may_hold_a_line_separator(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "two\u2028lines"}, ensure_ascii=False)
    assert FilePrompts(prompt_file(tmp_path, line)).rows() == (PromptRow("two\u2028lines"),)


@pytest.mark.parametrize(("line", "said"), BAD.items(), ids=[*BAD.values()])
def test_a_malformed_row_is_an_error_with_path_and_physical_line(tmp_path: Path, line: str, said: str) -> None:
    path = prompt_file(tmp_path, GOOD, GOOD, line, GOOD)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        FilePrompts(path)
    first, last = str(caught.value).splitlines()
    assert first.startswith(f"{path}:3: {said}")
    assert last == "1 bad rows in all"


def test_an_empty_line_of_a_text_file_is_an_error_too(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, "a cat", "", "a dog", name="prompts.txt")
    with pytest.raises(ValueError, match=f"{path}:2: the prompt is empty"):
        FilePrompts(path)


def test_skipped_rows_are_counted_by_reason(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, GOOD, *BAD, "", GOOD)
    source = FilePrompts(path, max_bad_share=0.9)
    assert [row.prompt for row in source.rows()] == ["a cat", "a cat"]
    assert source.skipped() == {
        "not valid JSON": 1,
        "a row must be a JSON object, got list": 1,
        "a row must be a JSON object, got str": 1,
        "the row has no 'prompt'": 1,
        "the prompt must be a string": 2,
        "the prompt is empty": 1,
        "the line is blank": 2,
        "a key stands twice": 1,
        "not a JSON number": 1,
    }


def test_more_bad_rows_than_allowed_are_an_error_exactly_as_many_are_not(tmp_path: Path) -> None:
    path = prompt_file(tmp_path, GOOD, GOOD, GOOD, "[]")
    assert len(FilePrompts(path, max_bad_share=0.25).rows()) == 3
    with pytest.raises(ValueError, match="1 bad rows in all"):
        FilePrompts(path, max_bad_share=0.24)


def test_a_file_without_a_usable_prompt_is_an_error_whatever_may_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no usable prompt"):
        FilePrompts(prompt_file(tmp_path))
    with pytest.raises(ValueError, match=r"holds no usable prompt: .*:1: a row must be a JSON object"):
        FilePrompts(prompt_file(tmp_path, "[]", "[]"), max_bad_share=0.9)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_0_to_1_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match=f"max_bad_share must be in .0, 1., got {share}"):
        FilePrompts(prompt_file(tmp_path, GOOD), max_bad_share=share)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no prompt file {tmp_path / 'none.txt'}"):
        FilePrompts(tmp_path / "none.txt")


def test_listed_prompts_must_be_there_and_say_something() -> None:
    assert ListedPrompts(("a", "b")).rows() == (PromptRow("a"), PromptRow("b"))
    with pytest.raises(ValueError, match="prompts is empty"):
        ListedPrompts(())
    with pytest.raises(ValueError, match=r"prompts\[1\] is an empty prompt"):
        ListedPrompts(("a", " "))


# Epochs


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    epochs = [[row for batch in range(5 * e, 5 * e + 5) for row in epoch_rows(10, 2, batch, key=(7,))] for e in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


def test_the_order_depends_on_the_key() -> None:
    assert epoch_rows(10, 10, 0, key=(7,)) != epoch_rows(10, 10, 0, key=(8,))


def test_rows_left_over_at_the_end_of_an_epoch_open_the_next_batch() -> None:
    batches = [epoch_rows(10, 4, batch, key=(7,)) for batch in range(5)]
    drawn = [row for batch in batches for row in batch]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert all(len(batch) == 4 for batch in batches)


def test_a_resume_after_three_of_five_batches_draws_the_seventh_and_eighth_prompt_of_the_same_shuffle() -> None:
    straight = PromptSampler(rows_of(10), count=2, seed=5)
    resumed = PromptSampler(rows_of(10), count=2, seed=5)
    order = [text for rollout in range(5) for text in texts(straight.draw(rollout))]
    assert sorted(order) == sorted(row.prompt for row in rows_of(10))
    assert texts(resumed.draw(3)) == order[6:8]
    # The epochs after the wrap are those of a run that was never stopped.
    assert [texts(resumed.draw(r)) for r in range(5, 15)] == [texts(straight.draw(r)) for r in range(5, 15)]
    assert [texts(straight.draw(r)) for r in range(5, 10)] != [texts(straight.draw(r)) for r in range(5)]


@pytest.mark.parametrize("count", [0, 4])
def test_a_batch_larger_than_the_data_is_refused_at_the_start(count: int) -> None:
    with pytest.raises(ValueError, match=f"prompts_per_step={count} does not fit the 3 prompts"):
        PromptSampler(rows_of(3), count=count, seed=0)


@pytest.mark.parametrize("per_step", [4, 6, 20])
def test_in_each_epoch_every_prompt_has_exactly_one_complete_group(per_step: int) -> None:
    sampler, group = PromptSampler(rows_of(20), per_step, seed=1), 4
    requests = [Sample((sampler.draw(r),)).fork(group, SAMPLING) for r in range(120 // per_step)]
    drawn = [texts(request.roots)[row] for request in requests for row in request.parent_rows().tolist()]
    for epoch in range(6):
        counts = Counter(drawn[epoch * 20 * group : (epoch + 1) * 20 * group])
        assert counts == {row.prompt: group for row in rows_of(20)}
    for request in requests:
        assert set(Counter(request.frontier.groups("group")).values()) == {group}


# Identity


def test_ids_are_unique_over_rollouts_and_carry_the_rollout() -> None:
    sampler = PromptSampler(rows_of(3), count=2, seed=0)
    assert [sampler.draw(r).ids for r in (0, 1)] == [["r0.p0", "r0.p1"], ["r1.p0", "r1.p1"]]


def test_two_rows_of_the_same_text_are_two_groups() -> None:
    sampler = PromptSampler((PromptRow("same", {"row": 0}), PromptRow("same", {"row": 1})), count=2, seed=0)
    part = Sample((sampler.draw(0),)).fork(2, SAMPLING).frontier
    rewards = Scores(torch.tensor([0.0, 2.0, 10.0, 14.0]), {}, [()] * 4)
    advantages = part.with_rewards(rewards).compute_advantages("group", "group_std", eps=0.0).advantages
    assert advantages is not None
    assert advantages.tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert len(set(part.groups("group"))) == 2


def test_the_same_row_twice_in_a_batch_is_two_groups() -> None:
    """Three rows, two a batch: the second batch ends one epoch and begins the next, perhaps with the same row."""
    twice = [b for b in range(60) if len(set(epoch_rows(3, 2, b, key=(0, "prompts")))) == 1]
    assert twice, "a seed whose epochs meet in one row"
    roots = PromptSampler(rows_of(3), count=2, seed=0).draw(twice[0])
    assert texts(roots)[0] == texts(roots)[1]
    assert len(set(Sample((roots,)).fork(2, SAMPLING).frontier.groups("group"))) == 2


def test_metadata_travels_with_its_row_and_is_not_shared_with_the_source() -> None:
    source = (PromptRow("a", {"answer": 1}), PromptRow("b", {"answer": 2}))
    roots = as_roots(list(source), 0)
    assert roots.metadata == [{"answer": 1}, {"answer": 2}]
    roots.metadata[0]["answer"] = 9
    assert source[0].metadata == {"answer": 1}


def test_pictures_are_files_beside_the_jsonl_file_and_sources_of_the_root(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), (255, 0, 51)).save(tmp_path / "a.png")
    path = prompt_file(tmp_path, '{"prompt": "a red cat", "pictures": ["a.png", "a.png"]}', '{"prompt": "a dog"}')
    rows = FilePrompts(path).rows()
    media = as_roots(list(rows), 0).media
    assert rows[0].metadata == {}
    assert media is not None
    assert media.sources is not None
    assert [len(pictures) for pictures in media.sources] == [2, 0]
    assert media.sources[0][0].shape == (3, 2, 4)
    torch.testing.assert_close(media.sources[0][0][:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


@pytest.mark.parametrize(
    ("pictures", "said"),
    [('"a.png"', "must be a list"), ('["gone.png"]', "no such picture"), ("[1]", "must be a list")],
)
def test_pictures_that_are_not_there_are_an_error_with_the_line(tmp_path: Path, pictures: str, said: str) -> None:
    path = prompt_file(tmp_path, '{"prompt": "a dog"}', f'{{"prompt": "a red cat", "pictures": {pictures}}}')
    with pytest.raises(ValueError, match=f"prompts.jsonl:2: .*{said}"):
        FilePrompts(path)


def test_prompts_without_pictures_have_no_sources() -> None:
    media = as_roots([PromptRow("a dog")], 0).media
    assert media is not None
    assert media.sources is None


def test_the_digest_is_of_prompts_metadata_and_their_order_and_of_nothing_else(tmp_path: Path) -> None:
    rows = ['{"prompt": "a", "answer": 1, "skill": "x"}', '{"prompt": "b"}']
    same = ['{"skill":"x","answer":1,"prompt":"a"}', rows[1]]
    text = '{"prompt": "a", "answer": "1", "skill": "x"}'
    others = [rows[::-1], rows[:1], [text, rows[1]], [rows[0], '{"prompt": "c"}']]
    digest, again, *different = [FilePrompts(prompt_file(tmp_path, *lines)).digest for lines in (rows, same, *others)]
    assert digest == again
    assert len({digest, *different}) == 5
