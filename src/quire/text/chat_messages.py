"""Chat messages of requests: check them, copy them to plain data, and shape them for templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.records import dataclass
from quire.types import RequestError

Message = dict[str, Any]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never assigned: Unicode 15, section 23.7
# Names of a message's reasoning; templates read the first (as in transformers).
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Limits of a chat request; `nodes` counts every string, number and container in it."""

    messages: int = 20_000
    nodes: int = 1_000_000
    chars: int = 1 << 23
    depth: int = 64
    role_chars: int = 128


class PlainCopier:
    """Copies request data to plain dict, list, str, int, float, bool and None, and counts it.

    So templates see no objects with other methods. Raises RequestError naming the field and the limit.
    """

    def __init__(self, limits: MessageLimits) -> None:
        self._limits = limits
        self.nodes = 0
        self.chars = 0

    def copy(self, field: str, value: Any, depth: int = 0) -> Any:
        limits = self._limits
        self.nodes += 1
        if self.nodes > limits.nodes:
            raise RequestError(field, f"more than {limits.nodes} values")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            self.chars += len(value)
            if self.chars > limits.chars:
                raise RequestError(field, f"more than {limits.chars} characters")
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if depth >= limits.depth:
            raise RequestError(field, f"nested more than {limits.depth} levels deep")
        if isinstance(value, Mapping):
            return {self._key(field, key): self.copy(field, item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(field, item, depth + 1) for item in value]
        raise RequestError(field, f"contains a {type(value).__name__}, which is not JSON data")

    def _key(self, field: str, key: Any) -> str:
        if not isinstance(key, str):
            raise RequestError(field, f"the key {key!r} is not a string")
        self.chars += len(key)
        return str.__str__(key)


def check_messages(
    messages: Sequence[Mapping[str, Any]], copier: PlainCopier, limits: MessageLimits
) -> list[Message]:
    """Return messages as plain dictionaries without null entries, each with a role and a valid content.

    content is a string or a list of {"type": "text", "text": …} parts and, of a system or assistant message, {"type":
    "thinking", "thinking": …} parts; null or missing only for an assistant that calls tools, or has reasoning.
    `function_call` and the role "function" become tool calls and their results. Tool-call
    arguments in JSON text (the OpenAI form) become objects, which templates print themselves. Raises
    RequestError("messages", …) naming the wrong message.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError("messages", f"must be a list, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages", "must not be empty")
    if len(messages) > limits.messages:
        raise RequestError("messages", f"{len(messages)} messages exceed the limit of {limits.messages}")
    checked: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError("messages", f"message {index} must be an object, not {type(message).__name__}")
        plain = copier.copy("messages", message)
        # as in transformers: a null entry would print as "None" or break a template that tests for presence
        given = {key: value for key, value in plain.items() if value is not None}
        checked.append(_check_message(index, _renew(index, given, checked), limits))
    return checked


def _check_message(index: int, message: Message, limits: MessageLimits) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError("messages", f"message {index} has no role")
    if len(role) > limits.role_chars:
        raise RequestError(
            "messages", f"message {index} has a role of {len(role)} characters, which is too long"
        )
    if "tool_calls" in message:
        _check_tool_calls(index, message["tool_calls"])
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RequestError("messages", f"message {index}: reasoning must be a string")
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = message.get("content")
    if content is None:
        if role != "assistant" or not (message.get("tool_calls") or reasoning):
            raise RequestError(
                "messages", f"message {index} has no content; only an assistant with tool_calls may"
            )
        if not message.get("tool_calls"):
            message["content"] = ""
    elif isinstance(content, list):
        for part in content:
            _check_part(index, role, part)
    elif not isinstance(content, str):
        raise RequestError(
            "messages",
            f"message {index}: content must be a string or a list of parts, not {type(content).__name__}",
        )
    return message


def _renew(index: int, message: Message, before: Sequence[Message]) -> Message:
    """OpenAI's older form of calls and their results in the present form, which templates read."""
    role, call = message.get("role"), message.pop("function_call", None)
    if role == "assistant" and call is not None and not message.get("tool_calls"):
        # nine letters and digits: templates of Mistral refuse other ids
        message["tool_calls"] = [{"id": f"call{index:05d}", "type": "function", "function": call}]
    elif role == "function":
        if not isinstance(message.get("name"), str):
            raise RequestError("messages", f"message {index} with the role function has no name")
        message["role"] = "tool"
        called = before[-1].get("tool_calls") if before else None
        if called:
            message.setdefault("tool_call_id", called[0].get("id"))
    return message


def _check_part(index: int, role: str, part: Any) -> None:
    """The text of a thinking part, which may consist of text parts, becomes a string, in place."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "thinking"):  # it may be no string
        raise RequestError(
            "messages",
            f"message {index}: a content part of type {kind!r:.40} is not supported, only 'text' and 'thinking'",
        )
    if kind == "thinking":
        if role not in {"assistant", "system"}:
            raise RequestError(
                "messages", f"message {index}: a message of the role {role!r:.40} has no thinking"
            )
        if isinstance(part.get("thinking"), list):
            for inner in part["thinking"]:
                if not isinstance(inner, dict) or inner.get("type") != "text":
                    raise RequestError("messages", f"message {index}: a thinking part consists of text parts")
                _check_part(index, role, inner)
            part["thinking"] = "".join(inner["text"] for inner in part["thinking"])
    if not isinstance(part.get(kind), str):
        raise RequestError("messages", f"message {index}: a {kind} part needs a string in {kind!r}")


def _check_tool_calls(index: int, calls: Any) -> None:
    if not isinstance(calls, list):
        raise RequestError(
            "messages", f"message {index}: tool_calls must be a list, not {type(calls).__name__}"
        )
    for call in calls:
        if not isinstance(call, dict):
            raise RequestError("messages", f"message {index}: a tool call must be an object")
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("messages", f"message {index}: a tool call needs a function with a name")
        if function.get("arguments") is None:
            function["arguments"] = "{}"
        elif not isinstance(function["arguments"], str | dict):
            raise RequestError(
                "messages", f"message {index}: tool call arguments must be JSON text or an object"
            )


def _parse_arguments(index: int, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("messages", f"message {index}: tool call arguments are not valid JSON") from None
    if not isinstance(value, dict):
        raise RequestError("messages", f"message {index}: tool call arguments must be a JSON object")
    return value


def parse_arguments(messages: list[Message]) -> None:
    """Parse JSON text in the arguments of tool calls, in place, for templates that work with objects."""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = _parse_arguments(index, function["arguments"])


def part_reasoning(messages: list[Message]) -> None:
    """Put an assistant's reasoning before its content as a part, in place, for templates that read it there."""
    for message in messages:
        content = message.get("content")
        if message["role"] == "assistant" and (thought := message.get("reasoning_content")):
            if isinstance(content, str):
                content = [{"type": "text", "text": content}] if content else []
            if not any(part["type"] == "thinking" for part in content or ()):
                message["content"] = [{"type": "thinking", "thinking": thought}, *(content or ())]


def gather_reasoning(messages: list[Message]) -> None:
    """Turn thinking parts into the message's reasoning, in place, for templates that know no such parts; of a system
    message, into text.
    """
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        thoughts = [part for part in parts if part["type"] == "thinking"]
        if thoughts and message["role"] == "assistant":
            message["content"] = [part for part in parts if part["type"] == "text"] or ""
            for name in REASONING[:2]:
                message.setdefault(name, "".join(part["thinking"] for part in thoughts))
        for part in thoughts:
            part.update(type="text", text=part.pop("thinking"))


def flatten(messages: list[Message]) -> None:
    """Join text parts with newlines, in place, for templates that print content as a string."""
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])


def wrap(messages: list[Message]) -> None:
    """Turn string contents into one text part, in place, for templates that only loop over parts."""
    for message in messages:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]


def free_tag(values: Any) -> str:
    """A character that no string in `values` contains, plain or as a JSON escape."""
    taken: set[str] = set()
    stack = [values]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            taken.update(char for char in _NONCHARACTERS if char in node or escaped(char) in node)
        elif isinstance(node, dict):
            stack += [*node, *node.values()]
        elif isinstance(node, list):
            stack += node
    free = [char for char in _NONCHARACTERS if char not in taken]
    if not free:
        raise RequestError("messages", "the text uses all Unicode noncharacters from U+FDD0 to U+FDEF")
    return free[0]


def escaped(char: str) -> str:
    """The output of an ASCII-only JSON filter for a character."""
    return f"\\u{ord(char):04x}"
