"""Tool servers (MCP) behind /v1/responses: against real ones, over pipes and over HTTP."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.dialects import events
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving
from mcp.tool_server import HttpToolServer

PIPES = Path(__file__).parents[1] / "mcp" / "tool_server.py"
KEY, OTHER = ({"authorization": f"Bearer {key}"} for key in ("k", "other"))


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ADD = call("add", a=2, b=3)
SAYS = {
    "two and three": "Let me add.\n" + ADD,
    "[tool] 5": "It is 5.",
    "both at once": ADD + "\n" + call("add", a=4, b=5),
    "[tool] 9": "They are 5 and 9.",
    "my own": ADD + "\n" + call("flag", on=True),
    "on and on": ADD,
}


@pytest.fixture(scope="module")
def web() -> Iterator[HttpToolServer]:
    server = HttpToolServer("events")
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_folder(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(scope="module")
def script(folder: Path) -> Script:
    made = Script(folder)
    for key, text in SAYS.items():
        made.says(key, text)
    return made


def servers_file(folder: Path, servers: dict[str, Any], **more: Any) -> str:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers} | more))
    return str(path)


def piped(*tools: str, mode: str = "asks", **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(PIPES), "pipes", mode], "tools": list(tools), **more}


@pytest.fixture(scope="module")
def server(
    folder: Path, script: Script, web: HttpToolServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    made = {
        "calc": piped("add", "sleep", "fail", "die", "long", timeout=5),
        "web": {"url": web.url, "tools": ["add", "erase"]},
    }
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": ("k", "other")}
    path = servers_file(tmp_path_factory.mktemp("mcp"), made, rounds=3)
    with (
        script.played(),
        serving(folder, {"max_model_len": 4096}, mcp=path, served_model_name=("tiny",), **options) as live,
    ):
        yield live


def mcp(label: str = "calc", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", "allowed_tools": ["add"], **more}


def send(server: LiveServer, said: Any, key: dict[str, str] = KEY, **fields: Any) -> Reply:
    return server.post("/v1/responses", {"model": "tiny", "input": said, "tools": [mcp()]} | fields, key)


def made(server: LiveServer, said: Any, **fields: Any) -> dict[str, Any]:
    reply = send(server, said, **fields)
    assert reply.status == 200, reply.text
    return dict(reply.json)


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_smoke(server: LiveServer) -> None:
    found = made(server, "two and three")
    print(json.dumps(found, indent=1))
    assert kinds(found) == ["mcp_list_tools", "message", "mcp_call", "message"]
    reply = send(server, "two and three", stream=True)
    print(reply.text)
    assert 0
