"""Parse JSON objects from untrusted files: bounded size, no duplicate keys, clear errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

from quire.types import CheckpointError
from quire.util.files import open_regular

JsonObject = dict[str, object]


def parse_json_object(data: bytes, where: str) -> JsonObject:
    """Parse UTF-8 `data` as one JSON object.

    Raises CheckpointError naming `where` for anything else: invalid UTF-8 or JSON, an array at the top, a duplicate key
    at any level, nesting beyond the parser's stack, an integer with thousands of digits.
    """
    value = _parse(data, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json_objects(data: bytes, where: str) -> list[JsonObject]:
    """Parse UTF-8 `data` as one JSON array of objects; raises as parse_json_object."""
    value = _parse(data, where)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CheckpointError(f"{where}: expected a JSON array of objects")
    return value


def _parse(data: bytes, where: str) -> object:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where}: not valid JSON: {detail}") from None


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises CheckpointError if it is missing, not regular or larger than `max_bytes`."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
    if len(data) > max_bytes:
        raise CheckpointError(f"{path.name}: larger than the limit of {max_bytes} bytes")
    return data


def read_json_object(path: Path, max_bytes: int) -> JsonObject:
    """Read a file of at most `max_bytes` bytes with `parse_json_object`."""
    return parse_json_object(read_small_file(path, max_bytes), path.name)


def _no_duplicates(pairs: list[tuple[str, object]]) -> JsonObject:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:100]!r}")
            seen.add(key)
    return out
