"""Anthropic's Messages over HTTP: its fields, its events, its errors. Examples are those of its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.dialects import ADD, SAYS, WEATHER, events, fold_message, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving

TOOLS = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER},
    {"name": "add", "input_schema": ADD, "type": "custom", "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": ("k",)}
    with (
        script.played(),
        serving(folder, {"max_model_len": 2048}, served_model_name=("tiny",), **options) as live,
    ):
        yield live


def send(server: LiveServer, text: str = "plain", path: str = "/v1/messages", **fields: Any) -> Reply:
    body = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": text}]} | fields
    return server.post(path, body, {"x-api-key": "k", "anthropic-version": "2023-06-01"})


def prompt(server: LiveServer, **fields: Any) -> str:
    """What the model reads: the answers of this model do not depend on it, so the tokens are counted instead."""
    return str(send(server, path="/v1/messages/count_tokens", **fields).json["input_tokens"])


def error(reply: Reply, status: int, kind: str) -> str:
    assert reply.status == status, reply.text
    assert set(reply.json) == {"type", "error"}
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == kind
    return str(reply.json["error"]["message"])


@pytest.mark.parametrize("key", [key for key in SAYS if key != "nothing"])
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    whole = send(server, key, tools=TOOLS).json
    reply = send(server, key, tools=TOOLS, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    streamed = fold_message(events(reply.body))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        usage = message.pop("usage")
        assert (
            usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
            > 20
        )
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")


def test_blocks_are_in_their_order(server: LiveServer) -> None:
    thought, call = send(server, "ponders", tools=TOOLS).json["content"]
    assert (thought["type"], thought["thinking"].strip()) == ("thinking", "The weather.")
    assert len(thought["signature"]) == 64
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": 'Paris, "Île"'},
    )
    found = send(server, "two calls", tools=TOOLS).json
    assert [block["name"] for block in found["content"]] == ["get_weather", "add"]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)


def test_why_it_stopped(server: LiveServer) -> None:
    assert send(server).json["stop_reason"] == "end_turn"
    stopped = send(server, stop_sequences=["text"]).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "text")
    assert stopped["content"] == [{"type": "text", "text": "Just "}]
    assert send(server, max_tokens=3).json["stop_reason"] == "max_tokens"
    cut = send(server, "one call", tools=TOOLS, max_tokens=55).json
    assert (cut["stop_reason"], cut["content"][-1]["input"]) == ("max_tokens", {})


def test_a_conversation_with_calls_is_that_of_a_chat(server: LiveServer) -> None:
    """The same prompt as the chat of OpenAI's form, token by token as far as their number shows."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "x"}, {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    count = send(
        server, path="/v1/messages/count_tokens", messages=turns, tools=TOOLS,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    ).json["input_tokens"]  # fmt: skip
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
    }
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "user", "content": "And now?"},
    ]
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}
         | ({"description": tool["description"]} if "description" in tool else {})}
        for tool in TOOLS
    ]  # fmt: skip
    body = {"messages": chat, "tools": tools}
    rendered = server.post("/v1/chat/completions/render", body, {"authorization": "Bearer k"}).json
    assert rendered["count"] == count
    answered = send(server, messages=turns, tools=TOOLS)
    assert answered.status == 200
    failed = [*turns[:2], {"role": "user", "content": [{**turns[2]["content"][0], "is_error": True}]}]
    assert send(server, messages=failed, tools=TOOLS).status == 200


def test_an_assistants_turn_at_the_end_is_continued(server: LiveServer) -> None:
    turns = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "Just"}]
    whole, opened = (
        send(server, path="/v1/messages/count_tokens", messages=turns[:count]).json["input_tokens"]
        for count in (1, 2)
    )
    assert opened == whole + len("Just")  # one token a byte, and no new turn


def test_tool_choice(server: LiveServer) -> None:
    flag = {"name": "flag", "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}},
                                             "required": ["on"], "additionalProperties": False}}  # fmt: skip
    for choice in ({"type": "any"}, {"type": "tool", "name": "flag", "disable_parallel_tool_use": True}):
        asked = {"tools": [flag], "tool_choice": choice, "temperature": 1.5, "max_tokens": 200}
        blocks = send(server, "anything", **asked).json["content"]
        assert {block["type"] for block in blocks} <= {"thinking", "tool_use"}
        assert isinstance(blocks[-1]["input"]["on"], bool)
    assert (
        send(server, "plain", tools=TOOLS, tool_choice={"type": "none"}).json["content"][0]["type"] == "text"
    )


def test_thinking(server: LiveServer) -> None:
    on = send(server, "anything", thinking={"type": "enabled", "budget_tokens": 8}, max_tokens=60).json
    assert on["content"][0]["type"] == "thinking"
    off = send(server, "anything", thinking={"type": "disabled"}, max_tokens=20, temperature=0).json
    assert [block["type"] for block in off["content"]] == ["text"]


def test_usage_of_the_cache(server: LiveServer) -> None:
    system = [{"type": "text", "text": "Only for this test. " * 20, "cache_control": {"type": "ephemeral"}}]
    first, second = (send(server, system=system).json["usage"] for _ in range(2))
    assert first["cache_creation_input_tokens"] > 300
    assert second["cache_creation_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - 16
    totals = [sum(v for k, v in usage.items() if not k.startswith("output")) for usage in (first, second)]
    assert totals[0] == totals[1]


def test_output_config_is_enforced(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    body = {
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    block = send(server, "anything", **body).json["content"][-1]
    assert set(json.loads(block["text"])) == {"on"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"max_tokens": 0}, "max_tokens: 0 is not"),
    ({"max_tokens": 5000}, "max_tokens: "),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: must not be empty"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0].content[0]: a block of type tool_use"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0]: a tool_use is answered"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type: "),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: "),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice: 'g' is not"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: missing"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "thinking.budget_tokens: 300 is not below"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 3}}, "thinking.budget_tokens: needs the type enabled"),
    ({"output_config": {"effort": "high"}}, "output_config.effort: 'high'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1/x"}}}},
     "output_config.format.schema"),
    ({"temperature": -1.0}, "temperature: "),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: "),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], text: str) -> None:
    assert text in error(send(server, **fields), 400, "invalid_request_error")


def test_errors_have_anthropics_classes(server: LiveServer) -> None:
    error(send(server, model="other"), 404, "not_found_error")
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert "x-api-key" in error(server.post("/v1/messages", body), 401, "authentication_error")
    error(server.post("/v1/messages", body, {"x-api-key": "wrong"}), 401, "authentication_error")
    error(server.get("/v1/messages", {"x-api-key": "k"}), 405, "invalid_request_error")
    reply = send(server)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert send(server, metadata={"user_id": "u"}, service_tier="auto").status == 200
