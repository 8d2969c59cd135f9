"""Files of one row a line, read strictly: what is wrong is said with the path and the physical line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
_MOST_DIGITS = 4300  # what Python itself reads of an integer


def read_lines(path: Path, read: Callable[[str], Row]) -> tuple[list[Row], list[str]]:
    """What `read` makes of each line of a UTF-8 file, and `path:line: reason` for each line that it refuses.

    A line ends at LF, CR LF or CR and nowhere else: a JSON string may hold U+2028, where `str.splitlines` would cut it.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        try:
            rows.append(read(_decoded(line)))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    return rows, problems


def accepted(path: Path, rows: list[Row], problems: list[str], max_bad_share: float, kind: str) -> tuple[Row, ...]:
    """The rows. ValueError where there is none, or where more than `max_bad_share` of all are malformed."""
    if not rows:
        raise ValueError(f"{path} holds no usable {kind}" + (f": {problems[0]}" if problems else ""))
    if len(problems) > max_bad_share * (len(rows) + len(problems)):
        raise ValueError(listing(problems))
    return tuple(rows)


def by_reason(problems: list[str]) -> dict[str, int]:
    """How many of the `problems` have each reason; what stands in brackets is of one row."""
    reasons = [problem.split(": ", 1)[1].split(" (", 1)[0] for problem in problems]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def listing(problems: list[str]) -> str:
    """The first problems, and how many there are."""
    return "\n".join([*problems[:10], f"{len(problems)} bad rows in all"])


def json_object(line: str) -> dict[str, Any]:
    """The JSON object of a line. ValueError for anything else, a key that stands twice, and NaN or Infinity."""
    if not line.strip():
        raise ValueError("the line is blank (take it out, also at the end of the file)")
    try:
        record = json.loads(
            line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"a row must be a JSON object, got {type(record).__name__}")
    return record


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 ({error})") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"a key stands twice ({twice})")
    return dict(pairs)


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number is too long ({len(digits)} digits; write it as a string)")
    return int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"not a JSON number ({name})")
