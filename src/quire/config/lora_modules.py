"""The adapters that a server begins with, as vLLM writes them: name=path, or an object of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

_KEYS = {"name", "path", "base_model_name"}


def adapter_paths(modules: Sequence[str]) -> dict[str, str]:
    """Name -> path of each adapter; a name alone is that of a shipped one, or a path. Raises ValueError."""
    found: dict[str, str] = {}
    for given in modules:
        name, path = _from_json(given) if given.lstrip().startswith("{") else _from_text(given)
        if not name or not path:
            raise ValueError(f"lora_modules: {given!r} is not name=path")
        if name in found:
            raise ValueError(f"lora_modules: {name!r} is given twice")
        found[name] = path
    return found


def _from_text(given: str) -> tuple[str, str]:
    name, sign, path = given.partition("=")
    return (name, path) if sign else (given, given)


def _from_json(given: str) -> tuple[str, str]:
    try:
        read = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora_modules: {given!r:.200} is not JSON: {error}") from None
    if strange := sorted(read.keys() - _KEYS):
        raise ValueError(f"lora_modules: {strange[0]!r} is unknown; known: {', '.join(sorted(_KEYS))}")
    name, path = read.get("name"), read.get("path")
    if not isinstance(name, str) or not isinstance(path, str):
        raise ValueError("lora_modules: needs a name and a path, both texts")
    return name, path
