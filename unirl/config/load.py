"""Plain data into dataclasses, strictly, and back: `load(cls, dump(config)) == config`.

A section is a dataclass. Field types: `int`, `float`, `bool`, `str`, `Path`, `Literal`, `X | None`, `tuple[X, ...]`
(from a list), `dict[str, X]`, a dataclass, or an abstract class, whose subclass `_target_` names. Nothing is coerced
but an int where a float is due. Every problem of the data is found in one pass and reported in one `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from unirl.config.error import ConfigError, nearest, problem, shown
from unirl.config.target import target_class

T = TypeVar("T")

_TARGET = "_target_"
_MISSING = "???"  # how a recipe says that the user must give a value


def load(cls: type[T], data: Any, path: str = "") -> T:
    """A `cls` from nested mappings and sequences. `path` is where `data` stands in the recipe, for messages.

    `load(Point, {"x": 1, "y": 2})` is `Point(x=1, y=2)`. A dataclass instance in the data is taken as it is.
    Raises `ConfigError` with all unknown keys, missing values, wrong types and refusals of `__post_init__`.
    """
    return _parse(cls, data, path)


def dump(config: Any) -> dict[str, Any]:
    """The plain data of a dataclass, with `_target_` where the class does not follow from the field's type."""
    hints = typing.get_type_hints(type(config))
    return {f.name: _plain(hints[f.name], getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def _parse(annotation: Any, value: Any, path: str) -> Any:
    if isinstance(value, str) and value == _MISSING:
        raise problem(path, f"missing; give {_described(annotation)}")
    if annotation is Any:
        return value
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, path)
    origin = typing.get_origin(annotation)
    if origin in _GENERICS:
        return _GENERICS[origin](annotation, value, path)
    assert _is_section(annotation), f"{path}: a setting cannot be of type {annotation}"
    return _section(annotation, value, path)


def _parse_parts(path: str, parts: Iterable[tuple[Any, Any, Any]], problems: Sequence[str] = ()) -> dict[Any, Any]:
    """Parse the (key, type, value) `parts` that stand below `path`; report what is wrong with all of them at once."""
    found, parsed = list(problems), {}
    for key, annotation, value in parts:
        try:
            parsed[key] = _parse(annotation, value, _join(path, key))
        except ConfigError as error:
            found += error.problems
    if found:
        raise ConfigError(*found)
    return parsed


def _bool(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise problem(path, f"expected true or false, got {shown(value)}")
    return value


def _int(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise problem(path, f"expected an int, got {shown(value)}; write a whole number such as 10")
    return value


def _float(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem(path, f"expected a number, got {shown(value)}; write it as 0.1 or 1e-4, without quotes")
    if not abs(value) <= sys.float_info.max:
        raise problem(path, f"{value} is not a finite number; give one, or null where the setting may be off")
    return float(value)


def _str(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise problem(path, f"expected text, got {shown(value)}; put it in quotes if it is meant as text")
    return value


def _path(value: Any, path: str) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise problem(path, f"expected a path, got {shown(value)}")
    return Path(os.path.expanduser(value))


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {bool: _bool, int: _int, float: _float, str: _str, Path: _path}


def _literal(annotation: Any, value: Any, path: str) -> Any:
    allowed = typing.get_args(annotation)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise problem(path, f"unknown value {shown(value)}; {nearest(value, allowed)}")
    return value


def _union(annotation: Any, value: Any, path: str) -> Any:
    members = _members(annotation)
    if value is None and type(None) in typing.get_args(annotation):
        return None
    if len(members) == 1:
        return _parse(members[0], value, path)
    for member in members:
        try:
            return _parse(member, value, path)
        except ConfigError:
            continue  # the next member may take it; if none does, the error below names them all
    raise problem(path, f"expected {_described(annotation)}, got {shown(value)}")


def _tuple(annotation: Any, value: Any, path: str) -> tuple[Any, ...]:
    items = typing.get_args(annotation)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise problem(path, f"expected {_described(annotation)}, got {shown(value)}; write [a, b]")
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise problem(path, f"expected {len(items)} values, got {len(value)}: {shown(value)}")
    return tuple(_parse_parts(path, zip(range(len(items)), items, value, strict=True)).values())


def _dict(annotation: Any, value: Any, path: str) -> dict[str, Any]:
    item = typing.get_args(annotation)[1]
    if not isinstance(value, Mapping):
        raise problem(path, f"expected {_described(annotation)}, got {shown(value)}; write name: value lines")
    parts = [(key, item, value[key]) for key in value if isinstance(key, str)]
    return _parse_parts(path, parts, _other_keys(value, path))


_GENERICS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Literal: _literal,
    Union: _union,
    types.UnionType: _union,
    tuple: _tuple,
    dict: _dict,
}


def _is_section(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation) or inspect.isabstract(annotation)


def _section(base: type, value: Any, path: str) -> Any:
    """A dataclass: `base` itself, or the subclass that `_target_` names."""
    if isinstance(value, base):
        return value
    if not isinstance(value, Mapping):
        raise problem(path, f"expected {_described(base)}, got {shown(value)}; write key: value lines, or leave it out")
    cls = base
    if _TARGET in value:
        cls = target_class(value[_TARGET], base, _join(path, _TARGET))
    elif inspect.isabstract(base):
        raise problem(
            path, f"missing {_TARGET} (got {shown(dict(value))}); name a subclass of {base.__module__}.{base.__name__}"
        )
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    problems = _other_keys(value, path)
    for key in value:
        if isinstance(key, str) and key != _TARGET and key not in fields:
            problems.append(
                f"{_join(path, key)}: unknown key of {cls.__name__} (got {shown(value[key])}); {nearest(key, fields)}"
            )
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(path, name)}: missing; give {_described(hints[name])}")
    settings = _parse_parts(path, [(key, hints[key], value[key]) for key in value if key in fields], problems)
    try:
        return cls(**settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise problem(path, str(error)) from error


def _other_keys(value: Mapping[Any, Any], path: str) -> list[str]:
    return [
        f"{_join(path, key)}: a key must be text, got {shown(key)}; quote it"
        for key in value
        if not isinstance(key, str)
    ]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union but None; of any other type, itself."""
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(member for member in typing.get_args(annotation) if member is not type(None))


def _described(annotation: Any) -> str:
    """A field type in the words of a message."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if member is type(None) else _described(member) for member in args)
    if origin is tuple:
        return f"a list of {_described(args[0])}" if args[-1] is Ellipsis else f"a list of {len(args)}"
    if origin is dict:
        return f"a mapping of names to {_described(args[1])}"
    words = {bool: "true or false", int: "an int", float: "a number", str: "text", Path: "a path", Any: "a value"}
    return words.get(annotation, f"a section of {annotation.__name__}")


def _plain(annotation: Any, value: Any) -> Any:
    members = _members(annotation)
    if dataclasses.is_dataclass(value):
        cls = type(value)
        target = {} if members == (cls,) else {_TARGET: f"{cls.__module__}.{cls.__qualname__}"}
        return target | dump(value)
    if isinstance(value, tuple):
        items = next(typing.get_args(member) for member in members if typing.get_origin(member) is tuple)
        items = (items[0],) * len(value) if items[-1] is Ellipsis else items
        return [_plain(item, one) for item, one in zip(items, value, strict=True)]
    if isinstance(value, dict):
        item = next((typing.get_args(member)[1] for member in members if typing.get_origin(member) is dict), Any)
        return {key: _plain(item, one) for key, one in value.items()}
    return str(value) if isinstance(value, Path) else value
