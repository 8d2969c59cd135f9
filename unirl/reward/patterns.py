"""Regular expressions of a recipe: checked when it is read, used on what a model wrote."""

from __future__ import annotations

import re


def check_pattern(setting: str, pattern: str, *, groups: int | None = None) -> None:
    """ValueError unless `pattern` compiles and has that many groups; None is any number."""
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{setting} is no regular expression: {error} (got {pattern!r})") from None
    if groups is not None and found != groups:
        raise ValueError(
            f"{setting} must have {groups} group in parentheses, got {found} in {pattern!r}; (?:...) does not count"
        )


def last_group(pattern: str, text: str) -> str | None:
    """The last group in `text` that is not blank: `last_group("= ([0-9]*)", "1 + 1 = 2 =") == "2"`; None without.

    Blank ones are passed over, since `(.*)` matches once more, with nothing, at the end of every text.
    """
    found = None
    for match in re.finditer(pattern, text):
        found = match[1] if match[1] and not match[1].isspace() else found
    return found
