"""Values inside tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def replace_each(value: Any, kind: type[Kind] | tuple[type[Kind], ...], change: Callable[[Kind], Any]) -> Any:
    """`value` with every `kind` inside it (in tuples, lists, dict values) replaced; `value` itself if there is none."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        items = [replace_each(item, kind, change) for item in value]
        return value if _same_objects(items, value) else type(value)(items)
    if type(value) is dict:
        items = [replace_each(item, kind, change) for item in value.values()]
        return value if _same_objects(items, value.values()) else dict(zip(value, items, strict=True))
    return value


def _same_objects(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
