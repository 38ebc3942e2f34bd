"""Requests in the shapes in which coding agents and chat pages send them, as their sources and issues document them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.dialects import WEATHER, events, fold_message, fold_response, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving

KEY = {"authorization": "Bearer k"}
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | WEATHER
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module", params=["", "qwen3"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A model that reasons, and one that does not."""
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    script.says("sunny", "<think>\nSo.\n</think>\n\nIt is sunny." if request.param else "It is sunny.")
    options = {"tool_call_parser": "hermes", "api_key": ("k",)}
    if request.param:
        options["reasoning_parser"] = request.param
    with (
        script.played(),
        serving(folder, {"max_model_len": 2048}, served_model_name=("tiny",), **options) as live,
    ):
        yield live


def asking(server: LiveServer) -> str:
    """What the model answers with a call."""
    return "ponders" if server.http.context.engine.reading(None) else "one call"


def claude_code(server: LiveServer, text: str, billed: str, **fields: Any) -> Reply:
    """A turn of Claude Code 2: three blocks of the system, of which the first differs every time."""
    header = f"x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={billed};"
    blocks = (
        header,
        "You are a CLI.",
        "Be brief. " * 20,
    )
    system = [{"type": "text", "text": block} | ({} if block is blocks[0] else CACHED) for block in blocks]
    reminder = {"type": "text", "text": "<system-reminder>\nAs you answer.\n</system-reminder>"}
    body = {
        "model": "tiny", "max_tokens": 300, "stream": True, "system": system, "temperature": 1,
        "messages": [{"role": "user", "content": [reminder, {"type": "text", "text": text} | CACHED]}],
        "tools": [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 200}, "metadata": {"user_id": "user_1_account__session_2"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    headers = {
        "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-app": "cli", "user-agent": "claude-cli/2.1.37 (external, cli)",
    }  # fmt: skip
    return server.post("/v1/messages?beta=true", body | fields, KEY | headers)


def test_claude_code(server: LiveServer) -> None:
    first = claude_code(server, asking(server), "1a2b3")
    assert first.status == 200, first.text
    message = fold_message(events(first.body))
    call = message["content"][-1]
    assert call["type"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} | CACHED
    turns = [
        {"role": "user", "content": [{"type": "text", "text": asking(server)}]},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    last = fold_message(events(claude_code(server, "", "9z8y7", messages=turns).body))
    assert (last["stop_reason"], last["content"][-1]["text"]) == ("end_turn", "It is sunny.")
    # The header for bills is no part of the prompt: what it says does not keep the rest from being found in the cache.
    again = fold_message(events(claude_code(server, asking(server), "4d5e6").body))
    assert again["usage"]["cache_read_input_tokens"] > 200


def codex(server: LiveServer, items: list[Any], **fields: Any) -> Reply:
    """A turn of Codex: the whole conversation every time, nothing stored."""
    body = {
        "model": "tiny", "instructions": "You are a coding agent.", "input": items, "tool_choice": "auto",
        "tools": [{"type": "function", "name": "get_weather", "description": "The weather.", "strict": False,
                   "parameters": WEATHER}],
        "parallel_tool_calls": False, "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a2-thread",
    }  # fmt: skip
    headers = {
        "originator": "codex_cli_rs",
        "session_id": "0199a2",
        "openai-beta": "responses=experimental",
        "accept": "text/event-stream",
    }
    return server.post("/v1/responses", body | fields, KEY | headers)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def test_codex(server: LiveServer) -> None:
    items = [
        said("developer", "<permissions>none</permissions>"),
        said("user", "<environment_context/>"),
        said("user", asking(server)),
    ]
    reply = codex(server, items)
    assert reply.status == 200, reply.text
    response = fold_response(events(reply.body))
    (call,) = (item for item in response["output"] if item["type"] == "function_call")
    assert set(json.loads(call["arguments"])) == {"city"}
    items += [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    last = fold_response(events(codex(server, items).body))
    assert last["output"][-1]["content"][0]["text"] == "It is sunny."


def test_open_webui(server: LiveServer) -> None:
    assert server.get("/v1/models", KEY).json["data"][0]["id"] == "tiny"
    chat = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "plain"}]}
    assert (
        server.post("/v1/chat/completions", chat | {"stream_options": {"include_usage": True}}, KEY).status
        == 200
    )
    title = {
        "stream": False,
        "max_completion_tokens": 50,
        "messages": [{"role": "user", "content": "### Task:\nA title."}],
    }
    assert server.post("/v1/chat/completions", chat | title, KEY).status == 200
    assert server.get("/api/version", KEY).json["version"]
    listed = server.get("/api/tags", KEY).json["models"][0]
    assert listed["model"] == "tiny"
    options = {"options": {"temperature": 0.7, "num_predict": 50}, "keep_alive": "5m"}
    assert server.post("/api/chat", chat | options, KEY).status == 200


def test_continue(server: LiveServer) -> None:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "plain"}],
        "max_tokens": 60,
        "stream": True,
    }
    assert server.post("/v1/chat/completions", chat, KEY).status == 200
    filled = {
        "model": "tiny", "prompt": "<fim_prefix>def f(<fim_suffix>):<fim_middle>", "max_tokens": 20,
        "temperature": 0.01, "stop": ["<fim_prefix>", "\n\n", "/src/", "#- coding: utf-8"], "stream": True,
    }  # fmt: skip
    assert server.post("/v1/completions", filled, KEY).status == 200
