"""What is wrong with a configuration, all of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

_LONGEST = 120


class ConfigError(ValueError):
    """Problems of a recipe, each one argument and one line: `path.to.key: what (value received), fix`."""

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.args)

    def report(self) -> str:
        """The problems as a program prints them."""
        return "".join(f"error: {line}\n" for line in self.problems)


@contextmanager
def refusals() -> Generator[None]:
    """A ValueError inside the block, which says what its reader can do, becomes a ConfigError: no traceback."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from error


def problem(path: str, text: str) -> ConfigError:
    """One problem at `path`; the root has the empty path."""
    return ConfigError(f"{path}: {text}" if path else text)


def shown(value: Any) -> str:
    """A received value as a message shows it: what it is, and its type where that is not plain to see."""
    if value is None:
        return "null"
    text = repr(value)
    return f"{text if len(text) <= _LONGEST else text[:_LONGEST] + '...'} ({type(value).__name__})"


def nearest(word: Any, known: Iterable[Any]) -> str:
    """`did you mean a or b? known: a, b, c`."""
    words = [str(one) for one in known]
    near = difflib.get_close_matches(str(word), words, n=2)
    question = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{question}known: {', '.join(words) or 'none'}"
