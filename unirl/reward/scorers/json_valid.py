"""Is the text JSON, and the JSON that was asked for?"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
from collections.abc import Iterable
from typing import Any

from unirl.reward.scorer import Scorer, ScorerInput

_DEEPEST = 50  # a validator calls itself several times a level
_FENCED = re.compile(r"\s*```(?:json|JSON)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class JsonValid(Scorer):
    """1 where the whole text is one JSON value (RFC 8259) that the schema allows, else 0.

    schema:     JSON Schema (draft 2020-12, or the one that it names); None takes any value, a lone number included
    schema_key: key of the prompt's row whose schema is taken instead
    fences:     a text that is one Markdown code fence counts as what it holds

    Not JSON: NaN and Infinity, a key twice in one object, anything before or after the value, numbers of more than 4300
    digits, more than 50 values inside one another. References to other documents are not fetched.
    Schemas need jsonschema (MIT, extra `unirl[json]`); give one with a `pattern` a `time_limit`.
    """

    reads = frozenset({"text"})

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
        except (ValueError, RecursionError):
            return 0.0
        return float(not _too_deep(value) and (validator is None or validator.is_valid(value)))

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

    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, got {schema!r}")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    if "$schema" in schema and schema["$schema"].rstrip("#") != str(kind.META_SCHEMA["$schema"]).rstrip("#"):
        raise ValueError(f"schema names an unknown draft, $schema={schema['$schema']!r}: leave it out for 2020-12")
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema is no JSON schema: {error.message} (at {error.json_path})") from None
    return kind(schema, registry=Registry())  # a registry of nothing: the default one would fetch over the network
