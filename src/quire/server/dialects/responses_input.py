"""The items of a Responses conversation as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.records import dataclass
from quire.server.dialects.responses_types import FunctionOffer
from quire.server.errors import ApiError, bad_request
from quire.types import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_ONCE = {"content", "reasoning_content"}  # in a message
_TEXTS = ("input_text", "output_text", "text")


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a request says, as items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


Item = dict[str, Any]
# The end of the id of a call that the model made together with the one before it, which has run on the server since:
# both are calls of one message.
TOGETHER = "p"


@dataclass(frozen=True, slots=True)
class McpNames:
    """The functions that stand for tools of servers: by label and name of the tool."""

    functions: Mapping[tuple[str, str], str]

    def of(self, item: Item) -> str:
        """The function that a call of a tool was."""
        return self.functions.get((item["server_label"], item["name"]), item["name"])


def chat_messages(
    items: Sequence[Item], instructions: str | None, names: McpNames | None = None
) -> list[dict[str, Any]]:
    """The messages of a conversation: what the assistant thinks, says and calls in a row is one, as is what stands in
    front for the system. Raises ApiError naming the wrong item.
    """
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls = _McpCalls(items, names or McpNames({}))
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind.startswith("mcp_"):
            for message in calls.messages(f"input[{index}]", item):
                _append(found, message, item)
        else:
            _append(found, _message(f"input[{index}]", item), item)
    for message in found:
        message.setdefault("content", None if "tool_calls" in message else "")
    return found


def _append(found: list[dict[str, Any]], message: dict[str, Any], item: Item) -> None:
    last = found[-1] if found else {"role": ""}
    if last["role"] == "tool" and "tool_calls" in message and str(item.get("id")).endswith(TOGETHER):
        before = next((one for one in reversed(found) if one["role"] != "tool"), last)
        if "tool_calls" in before:
            before["tool_calls"] += message["tool_calls"]
            return
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


class _McpCalls:
    """The calls of tools of servers in a conversation. The result of one that was approved stands behind the request
    for its approval.
    """

    def __init__(self, items: Sequence[Item], names: McpNames) -> None:
        self._names = names
        kinds = [(item.get("type"), item) for item in items]
        self._asked = {
            item["id"]
            for kind, item in kinds
            if kind == "mcp_approval_request" and isinstance(item.get("id"), str)
        }
        self._ran = {
            item["approval_request_id"]: item
            for kind, item in kinds
            if kind == "mcp_call" and isinstance(item.get("approval_request_id"), str)
        }
        self._answers = {
            str(item.get("approval_request_id")): item
            for kind, item in kinds
            if kind == "mcp_approval_response"
        }

    def messages(self, field: str, item: Item) -> list[dict[str, Any]]:
        """The messages that an item stands for. Raises ApiError naming what is wrong."""
        kind = item["type"]
        if kind == "mcp_list_tools":
            return []
        if kind == "mcp_approval_response":
            name = _string(f"{field}.approval_request_id", item.get("approval_request_id"))
            if not isinstance(item.get("approve"), bool):
                raise bad_request(
                    f"{field}.approve", f"{field}.approve: must be true or false", "invalid_type"
                )
            if name not in self._asked:
                where = f"{field}.approval_request_id"
                raise bad_request(where, f"{where}: there is no mcp_approval_request {name!r:.80}")
            return []
        if kind not in {"mcp_call", "mcp_approval_request"}:
            raise _unknown(field, kind)
        for part in ("id", "server_label", "name", "arguments"):
            _string(f"{field}.{part}", item.get(part))
        if kind == "mcp_call":
            asked = item.get("approval_request_id")
            if isinstance(asked, str) and asked in self._asked:
                return []
            return self._both(item, item)
        return self._both(item, self._ran.get(item["id"]))

    def _both(self, call: Item, ran: Item | None) -> list[dict[str, Any]]:
        """A call and its result."""
        function = {"name": self._names.of(call), "arguments": call["arguments"]}
        name = call["id"]
        made = {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]}
        if ran is not None:
            text = result_of(ran)
        else:
            answer = self._answers.get(name, {})
            text = "The user has not approved this call."
            if isinstance(answer.get("reason"), str):
                text = f"{text} {answer['reason']}"
        return [made, {"role": "tool", "tool_call_id": name, "content": text}]


def result_of(call: Item) -> str:
    """What the model is told of a call of a tool server."""
    error = call.get("error")
    if isinstance(call.get("output"), str):
        return str(call["output"])
    if isinstance(error, dict):
        content = error.get("content")
        if isinstance(content, list):
            return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        return str(error.get("message", ""))
    return str(error) if error else "This call was not run."


def _message(field: str, item: Item) -> dict[str, Any]:
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
            raise _unknown(field, kind)


def _unknown(field: str, kind: object) -> ApiError:
    message = f"{field}.type: {kind!r:.60} is not supported; it may be message, function_call,"
    return bad_request(
        f"{field}.type",
        f"{message} function_call_output, reasoning, mcp_list_tools, mcp_call or an mcp_approval",
    )


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
    raise RequestError(
        "tool_choice", 'must be "auto", "none", "required", a function, allowed_tools, or mcp with such tools'
    )
