"""What a request says about tools: its functions, which of them may be called, and how many calls an answer may have.

OpenAI's `tools` and `tool_choice`, and the older `functions` and `function_call`, are checked here and become one type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from quire.records import dataclass
from quire.text.chat_messages import MessageLimits, PlainCopier
from quire.types import RequestError

MAX_TOOLS = 512
MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NAMES_SHOWN = 8
# Tools are rendered into the prompt and may be compiled to a grammar.
_LIMITS = MessageLimits(nodes=100_000, chars=1 << 20, depth=48)


class Calls(StrEnum):
    """Whether the answer may, must or must not call functions."""

    AUTO = "auto"
    REQUIRED = "required"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, whose type is "object".

    `strict` functions have a schema that is enforced in every keyword, or refused.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request. `rendered` are all of them, for the template; `callable` those that may be called.

    Without `parallel` an answer has at most one call. `older` answers name their call `function_call`.
    """

    rendered: tuple[Mapping[str, Any], ...]
    callable: tuple[Function, ...]
    calls: Calls = Calls.AUTO
    parallel: bool = True
    older: bool = False


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    parallel: bool | None = None,
) -> ToolUse | None:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`; None without tools. Raises RequestError."""
    if not tools:
        if isinstance(tool_choice, Mapping) or tool_choice not in {None, "auto", "none"}:
            raise RequestError("tool_choice", "needs tools")
        return None
    rendered = _listed("tools", tools)
    functions = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(rendered)]
    _check_distinct("tools[{}].function.name", functions)
    calls, names = _choice(tool_choice, {function.name for function in functions})
    chosen = tuple(f for f in functions if names is None or f.name in names)
    return ToolUse(rendered=rendered, callable=chosen, calls=calls, parallel=parallel is not False)


def read_functions(
    functions: Sequence[Mapping[str, Any]] | None, function_call: str | Mapping[str, Any] | None = None
) -> ToolUse | None:
    """OpenAI's older `functions` and `function_call`; None without functions. Raises RequestError."""
    if not functions:
        if isinstance(function_call, Mapping) or function_call not in {None, "auto", "none"}:
            raise RequestError("function_call", "needs functions")
        return None
    listed = _listed("functions", functions)
    found = [_function(f"functions[{i}]", function) for i, function in enumerate(listed)]
    _check_distinct("functions[{}].name", found)
    calls, chosen = Calls.AUTO, tuple(found)
    if isinstance(function_call, Mapping):
        name = _known("function_call", function_call.get("name"), {function.name for function in found})
        calls, chosen = Calls.REQUIRED, tuple(f for f in found if f.name == name)
    elif function_call in {"auto", "none"}:
        calls = Calls(str(function_call))
    elif function_call is not None:
        raise RequestError("function_call", 'must be "auto", "none" or {"name": …}')
    rendered = tuple({"type": "function", "function": function} for function in listed)
    return ToolUse(rendered=rendered, callable=chosen, calls=calls, parallel=False, older=True)


def _listed(field: str, items: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The items as plain JSON objects."""
    if not isinstance(items, list | tuple):
        raise RequestError(field, f"must be a list of objects, not {type(items).__name__}")
    if len(items) > MAX_TOOLS:
        raise RequestError(field, f"{len(items)} exceed the limit of {MAX_TOOLS}")
    copier = PlainCopier(_LIMITS)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RequestError(f"{field}[{index}]", f"must be an object, not {type(item).__name__}")
    return tuple(copier.copy(f"{field}[{index}]", item) for index, item in enumerate(items))


def _tool(path: str, tool: Mapping[str, Any]) -> Function:
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(f"{path}.type", f'{kind!r} is not supported, only "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", "must be an object with a name")
    return _function(f"{path}.function", function)


def _function(path: str, function: Mapping[str, Any]) -> Function:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        shown = "a missing name" if name is None else repr(name)[:50]
        raise RequestError(
            f"{path}.name", f"{shown} is not 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' and '-'"
        )
    if not isinstance(function.get("description") or "", str):
        raise RequestError(f"{path}.description", "must be a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{path}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    _check_parameters(f"{path}.parameters", parameters)
    return Function(name, {**parameters, "type": "object"}, bool(strict))


def _check_parameters(path: str, schema: Any) -> None:
    """Raise RequestError for what can be no schema of an object; compiling it says more."""
    if not isinstance(schema, Mapping):
        raise RequestError(path, f"must be a JSON schema, an object, not {type(schema).__name__}")
    kind = schema.get("type", "object")
    if kind != "object":
        raise RequestError(f"{path}.type", f'{kind!r} is not "object": arguments are named')
    if not isinstance(schema.get("properties", {}), Mapping):
        raise RequestError(f"{path}.properties", "must be an object of schemas")
    for name, value in schema.get("properties", {}).items():
        if not isinstance(value, Mapping | bool):
            raise RequestError(f"{path}.properties.{name}", "must be a JSON schema, an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{path}.required", "must be a list of names")


def _check_distinct(path: str, functions: Sequence[Function]) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            raise RequestError(path.format(index), f"{function.name!r} is the name of two functions")
        seen.add(function.name)


def _choice(choice: Any, names: set[str]) -> tuple[Calls, set[str] | None]:
    """What `tool_choice` allows: whether functions are called, and which; None for all."""
    if choice is None:
        return Calls.AUTO, None
    if isinstance(choice, str):
        if choice in set(Calls):
            return Calls(choice), None
    elif isinstance(choice, Mapping):
        function = choice.get("function")
        if choice.get("type") == "function" and isinstance(function, Mapping):
            return Calls.REQUIRED, {_known("tool_choice", function.get("name"), names)}
        allowed = choice.get("allowed_tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
            return _allowed(allowed, names)
    raise RequestError(
        "tool_choice",
        'must be "auto", "none", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}',
    )


def _allowed(allowed: Mapping[str, Any], names: set[str]) -> tuple[Calls, set[str]]:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in {"auto", "required"}:
        raise RequestError("tool_choice.allowed_tools.mode", 'must be "auto" or "required"')
    if not isinstance(tools, list) or not tools:
        raise RequestError("tool_choice.allowed_tools.tools", "must be a list of tools")
    chosen = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        chosen.add(_known(f"tool_choice.allowed_tools.tools[{index}]", name, names))
    return Calls(mode), chosen


def _known(field: str, name: Any, names: set[str]) -> str:
    if not isinstance(name, str) or name not in names:
        listed = sorted(names)
        more = ", …" if len(listed) > _NAMES_SHOWN else ""
        shown = f"{name[:50]!r}" if isinstance(name, str) else "a missing name"
        raise RequestError(
            field, f"{shown} is not the name of a function: {', '.join(listed[:_NAMES_SHOWN])}{more}"
        )
    return name
