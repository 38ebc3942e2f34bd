"""A validator for the part of JSON Schema that the generator writes."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_KNOWN = {"type", "properties", "required", "items", "enum", "description", "additionalProperties"}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is valid. Raises ValueError on a keyword that is not implemented."""
    unknown = set(schema) - _KNOWN
    if unknown:
        raise ValueError(f"schema keywords not implemented: {sorted(unknown)}")
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", list(_TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list) and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    return True


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _object_fits(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= set(value):
        return False
    if schema.get("additionalProperties") is False and not set(value) <= set(properties):
        return False
    return all(fits(item, properties[key]) for key, item in value.items() if key in properties)
