"""Is the text JSON, and the JSON that was asked for?"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from unirl.reward.scorer import Scorer, ScorerInput

_DEEPEST = 50  # a validator calls itself several times a level
_FENCED = re.compile(r"\s*```(?:json|JSON)?\s(.*)```\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class JsonValid(Scorer):
    """1 where the whole text is one JSON value (RFC 8259) that the schema allows, else 0.

    schema:     JSON Schema (draft 2020-12, or the one that it names); None takes any value, a lone number included
    schema_key: key of the prompt's row whose schema is taken instead
    fences:     a text that is one Markdown code fence, on one line or several, counts as what it holds

    Not JSON: NaN and Infinity, a key twice in one object, anything before or after the value, numbers of more than 4300
    digits, more than 50 values inside one another. Nor does a schema allow numbers that it cannot compute with, 1e400
    under `multipleOf`. A reference must lead to a place in the schema itself, and to an end.

    Schemas need jsonschema (MIT, extra `unirl[json]`). Some make a short text long work: alternatives that call
    themselves (twice as much a level), `uniqueItems` (the square of the length), a `pattern`. The service stops a
    sample after `time_limit`, and it is invalid.
    """

    reads = frozenset({"text"})

    time_limit: ClassVar[float | None] = 10.0

    schema: dict[str, Any] | None = None
    schema_key: str | None = None
    fences: bool = False

    def __post_init__(self) -> None:
        if self.schema is not None and self.schema_key is not None:
            raise ValueError(f"give schema or schema_key={self.schema_key!r}, not both: one would be ignored")
        if self.schema is None and self.schema_key is None:
            return
        if importlib.util.find_spec("jsonschema") is None:
            raise ValueError(
                "JsonValid with a schema needs jsonschema, which is not installed: pip install 'unirl[json]'"
            )
        if self.schema is not None:
            _validator(self.schema)

    def check_row(self, row: ScorerInput) -> None:
        if self.schema_key is not None:
            row.given(self.schema_key)

    def score(self, samples: list[ScorerInput]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: ScorerInput) -> float:
        validator = self._inline if self.schema_key is None else _validator(sample.given(self.schema_key))
        text = sample.written
        fenced = _FENCED.fullmatch(text) if self.fences else None
        try:
            value = json.loads(fenced[1] if fenced else text, object_pairs_hook=_object, parse_constant=_constant)
            return float(not _too_deep(value) and (validator is None or validator.is_valid(value)))
        except (ValueError, RecursionError, OverflowError):  # the last one: the validator divides what was written
            return 0.0

    @functools.cached_property
    def _inline(self) -> Any:
        return None if self.schema is None else _validator(self.schema)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _too_deep(value: Any) -> bool:
    layer, depth = [value], 0
    while layer and depth <= _DEEPEST:
        layer = [child for node in layer for child in _children(node)]
        depth += 1
    return depth > _DEEPEST


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _validator(schema: Any) -> Any:
    from jsonschema import SchemaError, validators
    from referencing import Registry
    from referencing.jsonschema import specification_with

    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, got {schema!r}")
    latest = validators.Draft202012Validator
    draft = schema.get("$schema", latest.META_SCHEMA["$schema"])
    kind = validators.validator_for({"$schema": draft}, default=latest) if isinstance(draft, str) else None
    if kind is None or draft.rstrip("#") != str(kind.META_SCHEMA["$schema"]).rstrip("#"):
        raise ValueError(f"schema names an unknown draft, $schema={draft!r}: leave it out for 2020-12")
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema is no JSON schema: {error.message} (at {error.json_path})") from None
    registry = Registry()  # of nothing: the default one would fetch over the network
    root = specification_with(draft).create_resource(schema)
    _check_references(root, registry.resolver_with_root(root))
    validator = kind(schema, registry=registry)
    try:
        for value in (None, True, 0, "", [], {}):  # one of each type
            validator.is_valid(value)
    except RecursionError:
        raise ValueError(f"schema refers to itself without an end, on its way to {value!r}: {schema!r}") from None
    return validator


def _check_references(schema: Any, resolver: Any) -> None:
    """ValueError for a reference of this resource, or of one within, that leads nowhere."""
    from referencing.exceptions import Unresolvable

    named = schema.contents if isinstance(schema.contents, dict) else {}
    for reference in (named[key] for key in ("$ref", "$dynamicRef") if key in named):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(
                f"schema refers to {reference!r}, which is not in it: put it under $defs, nothing is fetched"
            ) from None
    for part in schema.subresources():
        _check_references(part, resolver.in_subresource(part))
