"""The items of a Responses conversation as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.dialects.responses_types import FunctionOffer
from quire.server.errors import bad_request
from quire.types import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_ONCE = {"content", "reasoning_content"}  # in a message
_TEXTS = ("input_text", "output_text", "text")


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a request says, as items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def chat_messages(items: Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a conversation: what the assistant thinks, says and calls in a row is one, as is what stands in
    front for the system. Raises ApiError naming the wrong item.
    """
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        message = _message(f"input[{index}]", item)
        last = found[-1] if found else {"role": ""}
        shared = _ONCE & message.keys() & last.keys()
        if last["role"] == message["role"] == "assistant" and not shared:
            last["tool_calls"] = last.pop("tool_calls", []) + message.pop("tool_calls", [])
            last |= message
            if not last["tool_calls"]:
                del last["tool_calls"]
        elif last["role"] == message["role"] == "system":
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            found.append(message)
    for message in found:
        message.setdefault("content", None if "tool_calls" in message else "")
    return found


def _message(field: str, item: dict[str, Any]) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise bad_request(f"{field}.role", f"{field}.role: must be one of {', '.join(_ROLES)}")
            role = "system" if role == "developer" else role
            return {"role": role, "content": _text(f"{field}.content", item.get("content"))}
        case "function_call":
            names = ("call_id", "name", "arguments")
            key, name, arguments = (_string(f"{field}.{part}", item.get(part)) for part in names)
            _check_caller(field, item)
            function = {"name": name, "arguments": arguments}
            return {
                "role": "assistant",
                "tool_calls": [{"id": key, "type": "function", "function": function}],
            }
        case "function_call_output":
            key = _string(f"{field}.call_id", item.get("call_id"))
            return {
                "role": "tool",
                "tool_call_id": key,
                "content": _text(f"{field}.output", item.get("output")),
            }
        case "reasoning":
            content = item.get("content")
            thought = "" if content is None else _text(f"{field}.content", content, ("reasoning_text",))
            return {"role": "assistant", "reasoning_content": thought} if thought else {"role": "assistant"}
        case kind:
            message = f"{field}.type: {kind!r:.60} is not supported; it may be message, function_call,"
            raise bad_request(f"{field}.type", f"{message} function_call_output or reasoning")


def _check_caller(field: str, item: dict[str, Any]) -> None:
    """Raise ApiError for a call that came from anything but the model."""
    for name, harmless in (("caller", ({"type": "direct"},)), ("namespace", ("",))):
        if (given := item.get(name)) is not None and given not in harmless:
            raise bad_request(
                f"{field}.{name}", f"{field}.{name}: not supported; functions are the client's, called by the model",
                "unsupported_parameter",
            )  # fmt: skip


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_request(field, f"{field}: must be a string", "invalid_type")
    return value


def _text(field: str, content: Any, kinds: tuple[str, ...] = _TEXTS) -> str:
    """The text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(field, f"{field}: must be a string or a list of parts", "invalid_type")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            where = f"{field}[{index}].type"
            raise bad_request(where, f"{where}: {kind!r:.60} is not supported, only {', '.join(kinds)}")
        texts.append(_string(f"{field}[{index}].text", part.get("text")))
    return "\n".join(texts)


def chat_tool(field: str, tool: FunctionOffer) -> dict[str, Any]:
    """A function in the form of a chat. Raises ApiError for one that is not in the prompt."""
    for name, refused, why in (
        ("defer_loading", tool.defer_loading, "all tools are in the prompt"),
        ("async", tool.asynchronous, "an answer waits for the results of its calls"),
    ):
        if refused:
            path = f"{field}.{name}"
            raise bad_request(path, f"{path}: not supported; {why}", "unsupported_parameter")
    given = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }


def chat_choice(choice: str | dict[str, Any] | None) -> Any:
    """A tool_choice in the form of a chat. Raises RequestError for another kind."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        listed = (
            [chat_choice(tool) for tool in tools if isinstance(tool, dict)]
            if isinstance(tools, list)
            else tools
        )
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": listed},
        }
    raise RequestError("tool_choice", 'must be "auto", "none", "required", a function or allowed_tools')
