"""Every keyword: texts that a grammar must accept, and texts that it must not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.grammar_bytes import accepts, producible, walk
from quire.structured.json_schema import HANDLERS, compile_json_schema, json_object_grammar

# Schema, values that are valid, values that are not.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [None, 1, "x", [1, {"a": []}], {"a": {"b": 0.5}}], []),
    ({"title": "x", "description": "y", "default": 3, "examples": [1], "$comment": "z", "x-any": {}}, [1, "a"], []),
    ({"type": ["null", "boolean"]}, [None, True, False], [0, 1, "true", [], {}]),
    ({"type": "integer"}, [0, -12, 10**40, 1.0], [1.5, "1", True]),
    ({"type": "number"}, [0, -1.25, 1e-9, 1e300], ["1", None]),
    ({"const": 1}, [1, 1.0], [True, 2, "1"]),
    ({"const": False}, [False], [0, None, "", []]),
    ({"const": {"a": [1, {"b": None}], "c": "é\n\u0001"}}, [{"a": [1, {"b": None}], "c": "é\n\u0001"}],
     [{}, {"a": [1, {"b": None}]}, {"a": [1, {"b": None}], "c": "é\n\u0001", "d": 1}]),
    ({"enum": ["a", 1, None, [0], {"k": 1}, 2.5]}, ["a", 1, None, [0], {"k": 1}, 2.5], ["b", 2, [1], {"k": 2}, {}]),
    ({"not": {"enum": ["a", 1, {"k": 1}, [2]]}}, ["b", 2, {"k": 2}, {}, {"k": 1, "l": 0}, [2, 2], []],
     ["a", 1, {"k": 1}, [2]]),
    ({"minimum": 2, "maximum": 10}, [2, 10, 2.5, "x"], [1.99, 10.01, -3]),
    ({"exclusiveMinimum": -1.5, "exclusiveMaximum": 0.25}, [-1, 0, 0.2, -1.4999], [-1.5, 0.25, 1, -2]),
    ({"exclusiveMinimum": 0}, [0.001, 1], [0, -1]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}, [2.9], [3, 4]),
    ({"type": "integer", "minimum": -105, "maximum": 99}, [-105, -9, 0, 99], [-106, 100, 1.5]),
    ({"multipleOf": 0.01}, [0.07, 19.99, 3, 0, -4.5], [0.001, 1.005]),
    ({"multipleOf": 5, "type": "integer"}, [0, 5, -15, 1000], [1, 12, 51]),
    ({"multipleOf": 7, "minimum": 10}, [14, 700], [7, 15]),
    ({"not": {"multipleOf": 2}, "type": "number"}, [1, 3, 2.5], [2, 0, -4]),
    ({"type": "number", "not": {"type": "integer"}}, [1.5, -0.25], [1, 0, 2.0]),
    ({"type": "integer", "not": {"const": 5}}, [4, 6, 55, -5], [5]),
    ({"type": "number", "not": {"enum": [5, 0.5]}}, [0.51, 4.9, -5, 5.1], [5, 0.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語", "😀😀"], ["a", "abcd", "😀", ""]),
    ({"pattern": "^a+b$"}, ["ab", "aaab", 3], ["b", "xab", "abx"]),
    ({"type": "string", "pattern": "b.d"}, ["xbcdx", 'b"d', "b\\d"], ["bd", "b\nd"]),
    ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*\\d).{4,}$"}, ["Ab12", "1234Z"], ["abcd", "A1b", "ABCD"]),
    ({"type": "string", "not": {"pattern": "^x"}}, ["ax", ""], ["x", "xa"]),
    ({"type": "string", "pattern": "^\\p{Lu}\\s$"}, ["Ä ", "A\u00a0"], ["a ", "AA"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "0000-01-01", "x"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:60Z", "1985-04-12T23:20:50.52+01:00"],
     ["2024-02-29 10:00:00Z", "2024-02-29T10:00:60Z"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de", '"x y"@[127.0.0.1]'], ["a", "a@", ".a@b"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1::d6:192.168.0.1"], ["1::2::3", "12345::", ":"]),
    ({"type": "string", "format": "uuid"}, ["2EB8AA08-aa98-11EA-B4Aa-73B441D16380"],
     ["2eb8aa08aa9811eab4aa73b441d16380"]),
    ({"type": "string", "format": "uri"}, ["http://a.b/c?d#e", "urn:x"], ["//a", "http:// x", "a"]),
    ({"type": "string", "format": "hostname", "maxLength": 9}, ["a-b.com", "a"], ["-a", "a-", "abcdefgh.com"]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31]),
    ({"items": {"type": "integer"}}, [[], [1, 2], "x"], [[1, "a"]]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[], [1], [1, 2]], [[2], [1, 2, 3]]),
    ({"items": [{"const": 1}], "additionalItems": {"const": 0}}, [[], [1], [1, 0, 0]], [[0], [1, 1]]),
    ({"minItems": 2, "maxItems": 3, "type": "array"}, [[1, 2], [1, 2, 3]], [[], [1], [1, 2, 3, 4]]),
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 2},
     [["a", "b"], [1, "b", "a"]], [["a"], ["a", "a"], [1, "a", 1]]),
    ({"contains": {"const": 5}}, [[5], [1, 5, "x"], "s"], [[], [1]]),
    ({"contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
     [[1, 2], ["a", 1, 2, "b", 3]], [[1], [1, 2, 3, 4], ["a"]]),
    ({"contains": {"const": 1}, "minContains": 0}, [[], [2]], []),
    ({"not": {"contains": {"const": 1}}, "type": "array"}, [[], [2, 3]], [[1], [2, 1]]),
    ({"unevaluatedItems": False, "prefixItems": [True], "anyOf": [{"prefixItems": [True, {"const": 2}]}, True]},
     [[1], [1, 2]], [[1, 3], [1, 2, 3]]),
    ({"properties": {"a": {"type": "integer"}, "b": True}, "required": ["b"]},
     [{"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}], [{"a": 1}, {"a": "x", "b": 1}, {}]),
    ({"properties": {"a": True}, "patternProperties": {"^b": {"type": "integer"}}, "additionalProperties": False},
     [{}, {"a": "x", "b1": 1}], [{"c": 1}, {"b": "x"}]),
    ({"patternProperties": {"^a": {"minimum": 1}, "b$": {"maximum": 3}}},
     [{"ab": 2}, {"a": 5}, {"b": 0}, {"c": 9}], [{"ab": 5}, {"ab": 0}, {"a": 0}]),
    ({"patternProperties": {"^(x|y)$": {"const": 1}}, "additionalProperties": False, "minProperties": 2},
     [{"x": 1, "y": 1}], [{"x": 1}, {"z": 1}]),
    ({"propertyNames": {"maxLength": 2, "pattern": "^[a-z]*$"}, "type": "object"},
     [{}, {"ab": 1}], [{"abc": 1}, {"A": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}, "type": "object"},
     [{}, {"b": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
    ({"properties": {"a": True, "b": True, "c": True}, "additionalProperties": False, "minProperties": 1,
      "maxProperties": 2}, [{"a": 1}, {"b": 1, "c": 1}], [{}, {"a": 1, "b": 1, "c": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"x": 1}, {"x": 1, "y": 2}],
     [{}, {"x": 1, "y": 1, "z": 1}]),
    ({"dependentRequired": {"a": ["b"]}, "type": "object"}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}}, [{"b": 2}, {"a": 0, "b": 1}],
     [{"a": 0, "b": 2}]),
    ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
     [{"a": 1, "b": 1}, {"c": 1, "d": 1}, {}], [{"a": 1}, {"c": 1}]),
    ({"unevaluatedProperties": False, "properties": {"a": True}, "oneOf": [
        {"properties": {"k": {"const": 1}, "b": True}, "required": ["k"]},
        {"properties": {"k": {"const": 2}, "c": True}, "required": ["k"]}]},
     [{"a": 1, "k": 1, "b": 2}, {"k": 2, "c": 3}], [{"k": 1, "c": 1}, {"a": 1}, {"k": 2, "x": 1}]),
    ({"not": {"additionalProperties": {"type": "integer"}}, "type": "object"}, [{"a": "x"}, {"a": 1, "b": "x"}],
     [{}, {"a": 1}]),
    ({"not": {"required": ["a"]}, "type": "object"}, [{}, {"b": 1}], [{"a": 1}]),
    ({"not": {"propertyNames": {"maxLength": 1}}, "type": "object"}, [{"ab": 1}, {"a": 1, "ab": 1}], [{}, {"a": 1}]),
    ({"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, [3, 5], [2, 6]),
    ({"anyOf": [{"type": "string"}, {"minimum": 5, "type": "number"}]}, ["x", 5], [4, None]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5], [3, 1.5]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, [{"a": 1}, {"b": 1, "c": 1}],
     [{}, {"a": 1, "b": 1}]),
    ({"if": {"properties": {"t": {"const": 1}}, "required": ["t"]}, "then": {"required": ["x"]},
      "else": {"required": ["y"]}, "type": "object"}, [{"t": 1, "x": 0}, {"y": 1}, {"t": 2, "y": 1}],
     [{"t": 1}, {"t": 1, "y": 1}, {}]),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "n": {
        "$ref": "#/$defs/n"}}, "required": ["v"], "additionalProperties": False}}},
     [{"v": 1}, {"v": 1, "n": {"v": 2, "n": {"v": 3}}}], [{"n": {"v": 1}}, {"v": 1, "n": {}}]),
    ({"$id": "http://x.y/z", "$ref": "#a", "$defs": {"q": {"$anchor": "a", "type": "null"}}}, [None], [1]),
    ({"$id": "http://x.y/tree", "$dynamicAnchor": "node", "type": "object", "properties": {"children": {
        "type": "array", "items": {"$dynamicRef": "#node"}}}, "additionalProperties": False},
     [{}, {"children": [{}, {"children": []}]}], [{"children": [1]}, {"x": 1}]),
    ({"type": "object", "properties": {"a": False, "b": {"type": "integer"}}, "additionalProperties": False},
     [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "array", "items": {"not": {}}, "maxItems": 3}, [[]], [[1]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda case: json.dumps(case)[:60])
def test_what_a_schema_allows(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    source = compile_json_schema(schema).source
    assert [value for value in valid if not producible(source, value)] == []
    assert [value for value in invalid if producible(source, value)] == []
    for seed in range(3):
        if (text := walk(source, seed, 30)) is not None:
            json.loads(text)


def test_every_keyword_has_a_case() -> None:
    written = json.dumps([schema for schema, _, _ in CASES])
    untested = {key for key in HANDLERS if f'"{key}"' not in written}
    assert untested == {"$recursiveRef"}, "which test_suite covers"


def test_keys_come_once_and_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": True, "a": True}, "required": ["c"]}
    schema["patternProperties"] = {"^d$": True}
    source = compile_json_schema(schema).source
    assert accepts(source, '{"b":1,"a":1,"c":1,"d":1,"e":1}')
    for text in ('{"a":1,"b":1,"c":1}', '{"c":1,"c":1}', '{"b":1,"b":1,"c":1}', '{"c":1,"d":1,"d":1}'):
        assert not accepts(source, text)
    assert not accepts(source, '{"c":1,"\\u0061":1}'), "a key in another spelling"


def test_whitespace_between_tokens() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    spaced, compact = (compile_json_schema(schema, whitespace=flag).source for flag in (True, False))
    text = '{ "a" :\n\t[ 1 , 2 ] }'
    assert accepts(spaced, text)
    assert not accepts(compact, text)
    assert accepts(compact, '{"a":[1,2]}')
    assert not accepts(spaced, '{"a":' + " " * 200 + "[]}"), "spaces without end"
    assert not accepts(spaced, '{"a b":1'), "negative control"


def test_any_object() -> None:
    source = json_object_grammar()
    assert accepts(source, '{"a":[1,{"b":null}],"c":"\\u0000\\n"}')
    for text in ("[]", '"x"', "1", '{"a"}', '{"a":1,}', "{'a':1}"):
        assert not accepts(source, text)


def test_strings_are_json() -> None:
    source = compile_json_schema({"type": "string"}).source
    for text in ('"\\u001f"', '"\\n"', '"\\\\"', '"\\""', '"\x7f"', '"😀"'):
        assert accepts(source, text)
        assert isinstance(json.loads(text), str)
    for text in ('"\n"', '"\\x"', '"\\u00zz"', '"a', '"\x00"'):
        assert not accepts(source, text)


def test_options_of_the_compiler_in_a_schema_say_nothing() -> None:
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    with_options = {
        **plain,
        "x-guidance": {"lenient": True, "coerce_one_of": True, "whitespace_pattern": ".*"},
    }
    assert compile_json_schema(with_options).source == compile_json_schema(plain).source


def test_the_same_schema_has_the_same_grammar() -> None:
    for schema, _, _ in CASES[::7]:
        assert compile_json_schema(schema) == compile_json_schema(json.loads(json.dumps(schema)))
