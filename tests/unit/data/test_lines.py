from __future__ import annotations

from pathlib import Path

import pytest

from unirl.data.lines import json_object, listing, read_lines


def written(folder: Path, content: bytes) -> Path:
    path = folder / "rows.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_line_ends_at_each_of_the_three_line_ends(tmp_path: Path, end: bytes) -> None:
    assert read_lines(written(tmp_path, b"a" + end + b"b" + end), str) == (["a", "b"], [])


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_no_other_character_ends_a_line(tmp_path: Path, inside: str) -> None:
    assert read_lines(written(tmp_path, f"a{inside}b\nc".encode()), str) == ([f"a{inside}b", "c"], [])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert read_lines(written(tmp_path, b"\xef\xbb\xbfa\nb"), str) == (["a", "b"], [])


def test_a_refused_line_is_named_by_its_physical_number(tmp_path: Path) -> None:
    path = written(tmp_path, b"1\n\nx\n4\n")
    rows, problems = read_lines(path, int)
    assert rows == [1, 4]
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:2", f"{path}:3"]


def test_bytes_that_are_no_utf_8_spoil_their_own_line_alone(tmp_path: Path) -> None:
    path = written(tmp_path, b"a\n\xff\nc")
    rows, problems = read_lines(path, str)
    assert rows == ["a", "c"]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:2: not valid UTF-8 (")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", r"the line is blank \(take it out, also at the end of the file\)"),
        ("  ", "the line is blank"),
        ('{"a": 1', "not valid JSON"),
        ("[]", "must be a JSON object, got list"),
        ('"x"', "must be a JSON object, got str"),
        ("null", "must be a JSON object, got NoneType"),
        ('{"a": 1, "a": 2}', r"a key stands twice \(\['a'\]\)"),
        ('{"a": {"b": 1, "b": 1}}', r"a key stands twice \(\['b'\]\)"),
        ('{"a": NaN}', r"not a JSON number \(NaN\)"),
        ('{"a": -Infinity}', r"not a JSON number \(-Infinity\)"),
        ('{"a": ' + "7" * 5000 + "}", r"^a number is too long \(5000 digits; write it as a string\)$"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "^brackets are nested too deeply$"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_plain_json_object_is_refused_with_the_reason(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        json_object(line)


def test_the_listing_shows_ten_problems_and_counts_all() -> None:
    lines = listing([f"p{i}" for i in range(12)]).splitlines()
    assert lines == [*(f"p{i}" for i in range(10)), "12 bad rows in all"]
