"""What a schema says of the type of an argument: how it is read from a tag, and written into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_HOPS = 16  # of references and nested choices
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
    (type(None), "null"),
)

Schema = Mapping[str, Any]


def resolve(schema: object, root: Schema) -> object:
    """A schema behind local references; as it is, if one leads nowhere."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        node: object = root
        for key in schema["$ref"].removeprefix("#").strip("/").split("/"):
            node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping):
            break
        schema = node
    return schema


def value_types(schema: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """The types of JSON that a schema allows; none if it does not say."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_HOPS:
        return frozenset()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found.update(item for item in declared if isinstance(item, str))
    if found:
        return frozenset(found)
    if "const" in schema:
        return frozenset((value_type(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(value_type, schema["enum"]))
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            inner = value_types(option, root, depth + 1)
            if not inner and name != "allOf":
                return frozenset()
            found |= inner
    return frozenset(found)


def value_type(value: object) -> str:
    """The type of a JSON value."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "string")


def tag_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value in a tag: JSON if it is a value of an allowed type, else the text as a string."""
    spelled = text.strip()
    spelled = _CONSTANTS.get(spelled, spelled)
    try:
        value = json.loads(spelled, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = value_type(value)
    allowed = kind in types or (kind == "integer" and "number" in types)
    if allowed or (kind != "string" and "string" not in types) or (types and "string" not in types):
        return spelled
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")
