from __future__ import annotations

import pytest

from unirl.data.sorting import SortExamples, SortPrompts


def test_an_answer_is_the_digits_of_its_prompt_going_up() -> None:
    for row in SortPrompts(number=50).rows():
        assert row.prompt == f"sort {row.prompt[5:10]}:"
        assert row.metadata == {"answer": "".join(sorted(row.prompt[5:10]))}


def test_no_prompt_stands_twice_and_none_of_the_held_out_ones_is_trained() -> None:
    sources = (SortPrompts("train", 20_000), SortPrompts("held_out", 500))
    train, held_out = ([row.prompt for row in source.rows()] for source in sources)
    assert len(set(train)) == 20_000
    assert len(set(held_out)) == 500
    assert not set(train) & set(held_out)


def test_examples_have_the_prompts_and_the_share_of_them_that_goes_down() -> None:
    """Of 4,000 rows, five standard deviations of the share are 0.04."""
    examples, prompts = SortExamples(number=4000).rows(), SortPrompts(number=4000).rows()
    assert [example[0].text for example in examples] == [row.prompt for row in prompts]
    directions = []
    for example, row in zip(examples, prompts, strict=True):
        up, down = row.metadata["answer"], row.metadata["answer"][::-1]
        assert example[1].text in (up, down)
        if up != down:
            directions.append(example[1].text == down)
    assert sum(directions) / len(directions) == pytest.approx(0.5, abs=0.04)
    for descending in (0.0, 1.0):
        rows = SortExamples(number=100, descending=descending).rows()
        answers = [row.metadata["answer"] for row in prompts[:100]]
        assert [row[1].text for row in rows] == [text[::-1] if descending else text for text in answers]


def test_a_forgotten_repeat_is_left_out_and_every_digit_stays_once() -> None:
    """Of 4,000 rows and over 3,000 repeated digits, five standard deviations of the share are 0.04."""
    whole = [row[1].text for row in SortExamples(number=4000).rows()]
    lost = [row[1].text for row in SortExamples(number=4000, forgotten=1.0).rows()]
    assert lost == ["".join(dict.fromkeys(text)) for text in whole]
    some = [row[1].text for row in SortExamples(number=4000, forgotten=0.7).rows()]
    assert all("".join(dict.fromkeys(text)) == text_lost for text, text_lost in zip(some, lost, strict=True))
    kept, repeats = (sum(map(len, texts)) - sum(map(len, lost)) for texts in (some, whole))
    assert repeats > 3000
    assert kept / repeats == pytest.approx(0.3, abs=0.042)


def test_more_prompts_than_there_are_and_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="number=501: of 5 digits there are 500 prompts in the part held_out"):
        SortPrompts("held_out", 501)
    with pytest.raises(ValueError, match="number=9501: of 4 digits there are 9500 prompts in the part train"):
        SortExamples(number=9501, digits=4)
    with pytest.raises(ValueError, match="digits must be 4 to 9, got 3"):
        SortPrompts(digits=3)
    with pytest.raises(ValueError, match=r"descending is a share in \[0, 1\], got 1.5"):
        SortExamples(descending=1.5)
    with pytest.raises(ValueError, match=r"forgotten is a share in \[0, 1\], got -1"):
        SortExamples(forgotten=-1)
