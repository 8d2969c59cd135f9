"""Lines of a data file, so that a message can name the line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """`(number, line)` from 1, as an editor counts; a byte order mark is left out.

    Only a line feed or a carriage return ends a line: a prompt may hold what else Unicode calls a line break.
    """
    yield from enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1)


def decoded(line: bytes) -> str:
    """The text of a line; ValueError where it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
