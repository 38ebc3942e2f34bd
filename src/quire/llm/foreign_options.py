"""Options of vLLM's LLM as options of the Python API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.config.elsewhere.foreign import VLLM, ForeignOptionError
from quire.config.elsewhere.lookup import rows_of, translate
from quire.config.schema import OPTIONS
from quire.util.likeness import did_you_mean
from quire.util.platform import memory_share


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of EngineConfig for options of which some are vLLM's. Raises ValueError naming the option."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        own = {name: value} if name in OPTIONS else _translated(name, value)
        for option, given in own.items():
            if option in found and found[option] != given:
                raise ValueError(f"{name}: contradicts another option; both are {option} here")
            found[option] = given
    return found


def _translated(name: str, value: Any) -> dict[str, Any]:
    """Options of Quire with the effect of one of vLLM: none for a value that asks for nothing, as its defaults do."""
    if name == "gpu_memory_utilization":
        return {} if value is None else {"memory": memory_share(value)}
    flag = f"--{name.replace('_', '-')}"
    if not rows_of(flag, VLLM):
        raise ValueError(f"{name} is not an option{did_you_mean(name, OPTIONS)}")
    if value is None or value in ("", (), [], {}):
        return {}
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    try:
        words = translate(flag, text, VLLM)
    except ForeignOptionError as error:
        if value is False and not error.essential:
            return {}
        raise ValueError(f"{name}: {value!r} {error}") from None
    return dict(_field(name, value, *word) for word in words)


def _field(name: str, value: Any, option: str, text: str | None) -> tuple[str, Any]:
    """The field that an option of the command line sets, and its value."""
    field = option.removeprefix("--no-").removeprefix("--").replace("-", "_")
    if field not in OPTIONS:
        raise ValueError(f"{name}: is {option} of quire serve, which the Python API does not have")
    if text is None:
        return field, not option.startswith("--no-")
    kind = str(OPTIONS[field].type)
    if "str" in kind or OPTIONS[field].metadata["size"]:
        return field, text
    try:
        return field, float(text) if "float" in kind else int(text)
    except ValueError:
        raise ValueError(f"{name}: {value!r} is not a value of {field}, which it is here") from None
