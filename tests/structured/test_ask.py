"""StructuredOutput: one kind, checked types, limits that are named."""

from __future__ import annotations

from typing import Any

import pytest

import quire
from quire import StructuredOutput
from quire.structured.ask import MAX_BYTES, MAX_CHOICES
from quire.types import RequestError


class Model:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "title": "Model"}


def endless() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({}, "structured", "give exactly one of json"),
        ({"json": {}, "regex": "a"}, "json", "not json and regex"),
        ({"json": False}, "json", "allows no value"),
        ({"json": 3}, "json", "must be a JSON object, .* not int"),
        ({"json": {"a": float("nan")}}, "json", "not valid JSON"),
        ({"json": {"a": object()}}, "json", "not valid JSON"),
        ({"json": {"a": endless()}}, "json", "nested too deeply"),
        ({"json_object": 1}, "json_object", "must be true or false, not 1"),
        ({"regex": 5}, "regex", "must be a string, not int"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex", "1.00 MiB exceed the limit of 1.00 MiB"),
        ({"regex": "é" * (MAX_BYTES // 2 + 1)}, "regex", "exceed the limit"),
        ({"regex": "\ud800"}, "regex", "character 0 is a lone surrogate"),
        ({"grammar": "x" * 10_000_000}, "grammar", "9.54 MiB exceed the limit of 1.00 MiB"),
        ({"grammar": 'root ::= "a"', "syntax": "bnf"}, "syntax", "must be one of auto, lark, gbnf"),
        ({"regex": "a", "syntax": "lark"}, "syntax", "applies only to grammar"),
        ({"regex": "a", "strict": False}, "strict", "applies only to JSON"),
        ({"choice": "ab"}, "choice", "must be a list of strings, not str"),
        ({"choice": []}, "choice", "empty"),
        ({"choice": ["a", 1]}, "choice[1]", "must be a string, not int"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice", f"exceed the limit of {MAX_CHOICES}"),
        ({"choice": ["a" * 600_000, "b" * 600_000]}, "choice", "exceed the limit"),
        ({"structural_tag": []}, "structural_tag", "must be a JSON object, .* not list"),
        ({"json": {}, "whitespace_pattern": " *"}, "whitespace_pattern", 'only "" is supported'),
        ({"choice": ["a"], "whitespace_pattern": ""}, "whitespace_pattern", "applies only to JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        StructuredOutput(**fields)
    assert raised.value.field == field


def test_equal_asks_have_one_digest() -> None:
    assert quire.StructuredOutput is StructuredOutput
    schema = {"type": "object", "title": "Model"}
    same = [StructuredOutput(json=value) for value in (schema, Model, '{"type":"object","title":"Model"}')]
    assert len({ask.digest() for ask in same}) == 1
    assert same[0] == same[1]
    others = [{"title": "Model", "type": "object"}, "{}", True]
    asks = [
        *same[:1],
        *(StructuredOutput(json=value) for value in others),
        StructuredOutput(json=schema, strict=False),
    ]
    assert len({ask.digest() for ask in asks}) == len(asks)  # also for another order of properties
    assert StructuredOutput(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutput(**same[0].values()) == same[0]
