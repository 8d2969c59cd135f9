from __future__ import annotations

import jsonschema
import pytest

from tests.unit.reward.samples import answered, one, service
from unirl.reward.scorers.json_valid import JsonValid
from unirl.reward.service import WeightedScorer

LONG = "word " * 200_000


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": [1, 2.5, null, true, "é 😀"]}', 1),
        (" 1 \n", 1),
        ("{}", 1),
        ("", 0),
        ("{'a': 1}", 0),
        ('{"a": 1,}', 0),
        ('{"a": 1, "a": 1}', 0),
        ('{"b": {"a": 1, "a": 2}}', 0),
        ('{"a": NaN}', 0),
        ("[Infinity]", 0),
        ("[-Infinity]", 0),
        ('{"a": 1} and so on', 0),
        ('So: {"a": 1}', 0),
        ('```json\n{"a": 1}\n```', 0),
        ('"a\nb"', 0),
        ("\ufeff{}", 0),
        ("9" * 5000, 0),
        ("[" * 50 + "]" * 50, 1),
        ("[" * 51 + "]" * 51, 0),
        ("[" * 100_000, 0),
        ("[" * 900 + "]" * 900, 0),
        ('{"a": ' * 100_000, 0),
        (LONG, 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_without_a_schema(text, score):
    assert one(JsonValid(), text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ann", "age": 3}', 1),
        ('{"name": "Ann"}', 1),
        ('{"age": 3}', 0),
        ('{"name": "Ann", "age": -1}', 0),
        ('{"name": "Ann", "age": "3"}', 0),
        ('{"name": "Ann", "more": 1}', 0),
        ("[]", 0),
        ("no", 0),
    ],
)
def test_json_with_a_schema_inline_or_of_the_row(text, score):
    assert one(JsonValid(schema=PERSON), text) == score
    assert one(JsonValid(schema_key="form"), text, form=PERSON) == score


def test_the_deepest_text_is_still_validated_by_a_schema_that_calls_itself():
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    assert one(JsonValid(schema=tree), "[" * 50 + "]" * 50) == 1
    assert one(JsonValid(schema=tree), "[" * 49 + "1" + "]" * 49) == 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('```json\n{"a": 1}\n```', 1),
        ('```\n{"a":\n 1}\n```\n', 1),
        ('{"a": 1}', 1),
        ('```json\n{"a": 1}', 0),
        ('Here:\n```json\n{"a": 1}\n```', 0),
        ("```json\n1\n```\n```json\n2\n```", 0),
        ("```python\n1\n```", 0),
        ('```json\r\n{"a": 1}\r\n```\r\n', 1),
        ('```json {"a": 1} ```', 1),
        ("```1```", 0),
    ],
)
def test_one_code_fence_around_all_is_accepted_where_asked_for(text, score):
    assert one(JsonValid(fences=True), text) == score


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "multipleOf": 0.01}, "1e400"),
        ({"type": "number", "multipleOf": 0.01}, "9" * 400),
        ({"multipleOf": 3}, "1e400"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_number_that_the_validator_cannot_divide_scores_0(schema, text):
    assert one(JsonValid(schema=schema), text) == 0


ANY_TREE = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}}]}


def test_alternatives_that_call_themselves_are_stopped_by_the_scorers_own_time_limit():
    assert WeightedScorer(JsonValid()).limit == 10.0
    judge = service(0.9, json=WeightedScorer(JsonValid(schema=ANY_TREE), time_limit=2.0))
    scores = judge.score(answered(["[" * 40 + "1" + "]" * 40, "[]", "1"]))
    judge.close()
    assert scores.valid.tolist() == [False, True, True]
    assert scores.total.tolist()[1:] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schema": {"type": "objekt"}}, "schema is no JSON schema: 'objekt' is not valid"),
        ({"schema": {"$schema": "draft-99"}}, "unknown draft"),
        ({"schema": {"$schema": 5}}, r"unknown draft, \$schema=5"),
        ({"schema": {"$ref": "#/nope"}}, "refers to '#/nope', which is not in it"),
        ({"schema": {"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}}}, r"refers to '#/\$defs/b'"),
        ({"schema": {"$ref": "http://127.0.0.1:9/schema.json"}}, r"127\.0\.0\.1.* nothing is fetched"),
        ({"schema": {"$ref": "#"}}, "refers to itself without an end"),
        ({"schema": {"anyOf": [{"type": "string"}, {"$ref": "#"}]}}, "refers to itself without an end"),
        ({"schema": {}, "schema_key": "form"}, "not both"),
    ],
)
def test_a_schema_that_is_wrong_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        JsonValid(**settings)


@pytest.mark.parametrize("draft", [jsonschema.Draft7Validator, jsonschema.Draft202012Validator])
def test_a_schema_may_name_its_draft(draft):
    assert one(JsonValid(schema={"$schema": draft.META_SCHEMA["$schema"], "type": "integer"}), "1") == 1


def test_a_row_without_a_schema_object_is_an_error():
    with pytest.raises(ValueError, match="a JSON schema is an object, got None"):
        one(JsonValid(schema_key="form"), "{}", form=None)
