"""Schemas with anything in the place of anything: refused as malformed, or compiled."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

from helpers.grammar_bytes import matcher
from quire.structured.json_schema import HANDLERS, SchemaError, compile_json_schema
from structured.json_schema.corpus import CORPUS
from structured.json_schema.test_keywords import CASES

KNOWN = [schema for schema, _, _ in CASES if isinstance(schema, dict)] + CORPUS
OTHER_KEYS = ("$id", "id", "$schema", "$anchor", "$dynamicAnchor", "then", "else", "minContains", "$defs")
KEYS = [*sorted(HANDLERS), *OTHER_KEYS]
VALUES: list[Any] = [
    None, True, False, 0, -1, 2, 1.5, 1e300, 10**30, "", "#", "#/", "a", "[", "\ud800", [], {}, [[]], [0],
    ["a"], [{}], {"": True}, {"a": []}, {"a": {"type": "string"}}, [True, False], {"$ref": "#"},
]  # fmt: skip


def inner(schema: Any) -> list[Any]:
    """All arrays and objects of a schema."""
    found, todo = [], [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list) and value:
            found.append(value)
            todo += value.values() if isinstance(value, dict) else value
    return found


def spoiled(rng: random.Random) -> Any:
    """A schema with a few of its values changed, added, removed or taken from another one."""
    schema = copy.deepcopy(rng.choice(KNOWN))
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(inner(schema) or [schema])
        value = copy.deepcopy(rng.choice(VALUES if rng.random() < 0.7 else KNOWN))
        if isinstance(place, list):
            place[rng.randrange(len(place))] = value
        elif rng.random() < 0.5 and place:
            place[rng.choice(list(place))] = value
        else:
            place[rng.choice(KEYS)] = value
    return schema


def compiled(seed: int, *, strict: bool) -> bool:
    """False if a spoiled schema is refused."""
    schema = spoiled(random.Random(seed))
    with suppress(SchemaError):
        matcher(compile_json_schema(schema, strict=strict).source)
        return True
    return False


def test_a_spoiled_schema_is_refused_or_compiled() -> None:
    found = [compiled(seed, strict=seed % 2 == 0) for seed in range(80)]
    assert min(found.count(False), found.count(True)) > 5
