"""JSON schemas by themselves, and inside of other grammars."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.byte_matcher import fits, source_of
from quire import StructuredOutput
from quire.structured.ask import GrammarError
from quire.structured.compile import compile_grammar

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("ask", "right", "wrong"),
    [
        ({"json": SCHEMA}, ['{"a":1}', '{"a": 1}'], ['{"a":"1"}', "{}"]),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": SCHEMA, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": True}, ["1", "[true]"], ["x"]),
        ({"json_object": True}, ['{"b":[1]}', "{}"], ["[]"]),
        (
            {"structural_tag": TAG},
            ["", 'a<f=x>{"a":1}</f>b<f=x>{"a": 2}</f>'],
            ['<f=x>{"b":1}</f>', '<f=x>{"a":1}'],
        ),
        (
            {"grammar": 'start: "x" %json {"type": "integer"} "y" | %json {"type": "boolean"}'},
            ["x12y", "true"],
            ["x", "xtruey"],
        ),
    ],
)
def test_values_are_valid(ask: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    source = source_of(**ask)
    assert [text for text in right if not fits(source, text)] == []
    assert [text for text in wrong if fits(source, text)] == []


@pytest.mark.parametrize(
    ("ask", "field", "message"),
    [
        ({"json": {"type": "odd"}}, "json.type", "expected one or several"),
        ({"json": "{"}, "json", "not valid JSON"),
        ({"json": '{"a": 1, "a": 2}'}, "json", "duplicate key 'a'"),
        ({"json": '{"a": NaN}'}, "json", "NaN is not a JSON number"),
        ({"json": '{"a":' * 50_000}, "json", "nested too deeply"),
        ({"grammar": 'start: %json {"type": "odd"}'}, "grammar", "/type"),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": 1}, "end": ""}]}},
         "structural_tag", "/type"),
        ({"structural_tag": {"format": {"type": "tag", "begin": "<", "end": "5",
          "content": {"type": "json_schema", "json_schema": {"type": "integer"}}}}}, "structural_tag", "ambiguous"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_keyword(ask: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        source_of(**ask)
    assert raised.value.field == field


def test_what_was_dropped_is_listed() -> None:
    lenient = StructuredOutput(json={"type": "string", "format": "no-such-format"}, strict=False)
    assert compile_grammar(lenient).dropped
    with pytest.raises(GrammarError, match="format"):
        compile_grammar(StructuredOutput(json={"type": "string", "format": "no-such-format"}))
