"""Chats with tools over HTTP: functions of finite arguments, and what the chunks of a stream add up to."""

from __future__ import annotations

import json
from typing import Any

from helpers.server import Reply

CITY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "visit",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ON: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
FLAG: dict[str, Any] = {"type": "function", "function": {"name": "flag", "parameters": ON}}


def fits(call: dict[str, Any]) -> bool:
    """Whether a call fits the schema of its function."""
    name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "flag":
        return set(given) == {"on"} and isinstance(given["on"], bool)
    return (
        set(given) == {"city", "days"}
        and given["city"] in {"Paris", "Rome"}
        and given["days"] in range(1, 10)
    )


def folded(reply: Reply) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream add up to, as OpenAI's clients add them."""
    assert reply.status == 200, reply.text
    return fold(reply.events[:-1])


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """See `folded`."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            choice = choices.setdefault(chunk["index"], {"message": {}, "logprobs": None})
            assert choice.get("finish_reason") is None, "nothing follows the end"
            choice["finish_reason"] = chunk["finish_reason"]
            if chunk.get("logprobs"):
                choice["logprobs"] = (choice["logprobs"] or []) + chunk["logprobs"]["content"]
            message = choice["message"]
            for name, value in chunk["delta"].items():
                if name == "tool_calls":
                    _fold_calls(message.setdefault("tool_calls", []), value)
                elif name == "function_call":
                    _fold_function(message.setdefault("function_call", {"arguments": ""}), value)
                elif value is not None or name not in message:
                    message[name] = value if message.get(name) is None else message[name] + value
    return [choices[index] for index in sorted(choices)]


def _fold_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):  # a call opens with its id, type and name
            assert delta["type"] == "function"
            assert delta["function"]["arguments"] == ""
            calls.append({"id": delta["id"], "type": "function", "function": {"arguments": ""}})
        else:
            assert set(delta) == {"index", "function"}, "later pieces are arguments alone"
        _fold_function(calls[delta["index"]]["function"], delta["function"])


def _fold_function(function: dict[str, Any], delta: dict[str, Any]) -> None:
    if "name" in delta:
        assert "name" not in function
        function["name"] = delta["name"]
    function["arguments"] += delta["arguments"]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two requests have in common: the ids of calls are each request's own."""
    found = json.loads(json.dumps(choices))
    for choice in found:
        choice["message"].pop("refusal", None)
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id")
    return [{"message": c["message"], "finish_reason": c["finish_reason"]} for c in found]
