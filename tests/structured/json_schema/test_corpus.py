"""Schemas as people write them: all are enforced, and what grammars lead to is JSON with unique names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.grammar_bytes import walk
from quire.structured.json_schema import SchemaError, compile_json_schema
from structured.json_schema.corpus import CORPUS


def refusal(schema: Any) -> str | None:
    try:
        compile_json_schema(schema)
    except SchemaError as error:
        return error.keyword
    return None


def test_all_are_enforced() -> None:
    assert len(CORPUS) == 200 == len({json.dumps(schema) for schema in CORPUS})
    assert [keyword for schema in CORPUS if (keyword := refusal(schema)) is not None] == []


@pytest.mark.parametrize("number", range(0, 200, 9))
def test_grammars_lead_to_json(number: int) -> None:
    if refusal(CORPUS[number]) is None:
        text = walk(compile_json_schema(CORPUS[number]).source, number, 40)
        assert text is None or isinstance(json.dumps(json.loads(text)), str)
