"""Tool servers (MCP) behind /v1/responses: against real ones, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.dialects import events
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving
from mcp.tool_server import HttpToolServer
from quire.config.serving import ServingConfig
from quire.engine.host.held import server_memory
from quire.mcp.session import McpError
from quire.mcp.settings import McpSettings, ServerSettings
from quire.server.metrics import ToolServerCounts
from quire.server.tool_servers import ToolServers

PIPES = Path(__file__).parents[1] / "mcp" / "tool_server.py"
PING = b": ping\n\n"
KEY, OTHER = ({"authorization": f"Bearer {key}"} for key in ("k", "other"))


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ADD = call("add", a=2, b=3)
PROMPTS = {
    "two and three": "Let me add.\n" + ADD,
    "both at once": ADD + "\n" + call("add", a=4, b=5),
    "my own": ADD + "\n" + call("flag", on=True),
    "thinks": "<think>\nAdd.\n</think>\n\n" + ADD,
}
SAYS = {
    **PROMPTS,
    "[tool] 5": "It is 5.",
    "[tool] 9": "They are 5 and 9.",
    "has not approved": "Then not.",
    # one call after the other: the last key that a prompt has is answered
    "counts": call("add", a=1, b=0),
    "[tool] 1\n": call("add", a=1, b=1),
    "[tool] 2\n": call("add", a=1, b=2),
    "[tool] 3\n": "Three.",
    "fails": call("fail"),
    "it is broken": "It failed.",
    "dies": call("die"),
    "has ended": "It died.",
    "sleeps": call("sleep", seconds=1000),
    "did not answer": "It sleeps.",
    "never wakes": call("sleep", seconds=1000),
    "which process": call("process"),
    "is long": call("long"),
    "xxxxxxxx": "Very long.",
    "no numbers": call("add", a="x"),
    "is no integer": "No integer.",
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
    refusing, huge = HttpToolServer("refuses"), HttpToolServer("huge")
    servers = {
        "calc": piped("*", timeout=100),
        "hasty": piped("*", timeout=1.2),
        "slow": piped("sleep", "add", timeout=1000),
        "web": {"url": web.url, "tools": ["add", "process"]},
        "refuses": {"url": refusing.url, "tools": ["add"]},
        "huge": {"url": huge.url, "tools": ["add"]},
        "closed": {"url": web.url + "?closed"},
    }
    options: dict[str, Any] = {
        "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": ("k", "other"),
        "sse_ping_interval": 0.5,
    }  # fmt: skip
    path = servers_file(tmp_path_factory.mktemp("mcp"), servers, rounds=3, message_bytes=300_000)
    with (
        script.played(),
        serving(folder, {"max_model_len": 4096}, mcp=path, served_model_name=("tiny",), **options) as live,
    ):
        yield live
    refusing.close()
    huge.close()


def mcp(label: str = "calc", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


FLAG = {"type": "function", "name": "flag", "parameters": {"type": "object"}}


def send(server: LiveServer, said: Any, key: dict[str, str] = KEY, **fields: Any) -> Reply:
    return server.post("/v1/responses", {"model": "tiny", "input": said, "tools": [mcp()]} | fields, key)


def made(server: LiveServer, said: Any, key: dict[str, str] = KEY, **fields: Any) -> dict[str, Any]:
    reply = send(server, said, key, **fields)
    assert reply.status == 200, reply.text
    return dict(reply.json)


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def says(response: dict[str, Any]) -> str:
    return str(response["output"][-1]["content"][0]["text"])


def calls(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "mcp_call"]


def fold(found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The response at the end of a stream; its items must be what the events before add up to."""
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    last, texts, done = found[-1][1]["response"], {}, {}
    progress: dict[int, list[str]] = {}
    for name, data in found[2:-1]:
        assert data["type"] == name
        at = data["output_index"]
        if name == "response.output_item.added":
            assert at == len(progress)
            progress[at], texts[at] = [], ""
        elif name == "response.output_item.done":
            done[at] = data["item"]
        elif name.endswith(".delta"):
            texts[at] += data["delta"]
        elif name.startswith("response.mcp"):
            progress[at].append(name.removeprefix("response."))
    assert [done[at] for at in range(len(done))] == last["output"]
    for at, item in done.items():
        if item["type"] == "mcp_call":
            how = item["status"]
            assert progress[at] == ["mcp_call.in_progress", "mcp_call_arguments.done", f"mcp_call.{how}"]
            assert texts[at] == item["arguments"]
        if item["type"] == "mcp_list_tools":
            how = "failed" if item["error"] else "completed"
            assert progress[at] == ["mcp_list_tools.in_progress", f"mcp_list_tools.{how}"]
        if item["type"] == "message":
            assert texts[at] == item["content"][0]["text"]
    assert found[-1][0] == f"response.{last['status']}"
    return dict(last)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    for name in ("id", "created_at", "completed_at"):
        response.pop(name)
    response["usage"].pop("input_tokens_details")
    for item in response["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return response


@pytest.mark.parametrize("key", [*PROMPTS, "counts", "fails"])
@pytest.mark.parametrize("approval", ["never", "always"])
def test_whole_and_streamed(server: LiveServer, key: str, approval: str) -> None:
    fields = {"tools": [mcp(require_approval=approval), FLAG]}
    whole = made(server, key, **fields)
    reply = send(server, key, stream=True, **fields)
    streamed = fold(events(reply.body.replace(PING, b"")))
    stored = server.get(f"/v1/responses/{streamed['id']}", KEY).json
    assert stored == streamed
    assert without_ids(streamed) == without_ids(whole)


def test_items(server: LiveServer) -> None:
    found = made(
        server, "two and three", tools=[mcp(allowed_tools=["add"], server_description="A calculator.")]
    )
    listed, before, ran, after = found["output"]
    assert listed["tools"] == [{
        "name": "add", "description": "Adds.", "annotations": {"readOnlyHint": True},
        "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}},
    }]  # fmt: skip
    assert listed["error"] is None
    assert before["content"][0]["text"] == "Let me add."
    assert (ran["status"], ran["name"], ran["server_label"]) == ("completed", "add", "calc")
    assert (json.loads(ran["arguments"]), ran["output"]) == ({"a": 2, "b": 3}, "5\n[image left out]")
    assert after["content"][0]["text"] == "It is 5."
    assert found["status"] == "completed"
    function = {
        "name": "add",
        "description": "A calculator.\n\nAdds.",
        "parameters": listed["tools"][0]["input_schema"],
    }
    chat = [
        {"role": "user", "content": "two and three"},
        {"role": "assistant", "content": "Let me add.", "tool_calls": [
            {"id": ran["id"], "type": "function", "function": {"name": "add", "arguments": ran["arguments"]}}]},
        {"role": "tool", "tool_call_id": ran["id"], "content": ran["output"]},
    ]  # fmt: skip
    tools = [{"type": "function", "function": function}]
    counts = [
        server.post("/v1/chat/completions/render", {"messages": said, "tools": tools}, KEY).json["count"]
        for said in (chat[:1], chat)
    ]
    assert found["usage"]["input_tokens"] == sum(counts)
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > counts[0] // 2


def test_a_conversation_goes_on_without_listing_again(server: LiveServer, web: HttpToolServer) -> None:
    """The calls of one answer stay in one message; whether the client sends the items or their id."""
    tools = [mcp("web")]
    first = made(server, "both at once", tools=tools)
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    one, two = calls(first)
    listed = [method for method, _ in web.seen].count("tools/list")
    linked = made(server, "two and three", tools=tools, previous_response_id=first["id"])
    said = [
        {"role": "user", "content": "both at once"},
        *first["output"],
        {"role": "user", "content": "two and three"},
    ]
    given = made(server, said, tools=tools)
    assert kinds(linked) == kinds(given)
    assert "mcp_list_tools" not in kinds(linked)
    assert linked["usage"]["input_tokens"] == given["usage"]["input_tokens"]
    assert [method for method, _ in web.seen].count("tools/list") == listed
    rendered: list[dict[str, Any]] = [
        {"role": "user", "content": "both at once"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": ran["id"], "type": "function", "function": {"name": "add", "arguments": ran["arguments"]}}
            for ran in (one, two)]},
        *({"role": "tool", "tool_call_id": ran["id"], "content": ran["output"]} for ran in (one, two)),
    ]  # fmt: skip
    functions = [
        {"type": "function", "function": {"name": tool["name"], "description": tool["description"] or "",
                                          "parameters": tool["input_schema"]}}
        for tool in first["output"][0]["tools"]
    ]  # fmt: skip
    counts = [
        server.post("/v1/chat/completions/render", {"messages": some, "tools": functions}, KEY).json["count"]
        for some in (rendered[:1], rendered)
    ]
    assert first["usage"]["input_tokens"] == sum(counts)


def test_calls_wait_for_approval(server: LiveServer) -> None:
    tools = [{"type": "mcp", "server_label": "calc"}]
    first = made(server, "two and three", tools=tools)
    assert kinds(first) == ["mcp_list_tools", "message", "mcp_approval_request"]
    asked = first["output"][-1]
    assert (asked["name"], asked["server_label"]) == ("add", "calc")
    answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    for stream in (False, True):
        reply = send(server, [answer], tools=tools, previous_response_id=first["id"], stream=stream)
        done = fold(events(reply.body.replace(PING, b""))) if stream else reply.json
        assert kinds(done) == ["mcp_call", "message"]
        assert done["output"][0]["approval_request_id"] == asked["id"]
        assert says(done) == "It is 5."
    refused = made(
        server,
        [answer | {"approve": False, "reason": "Too early."}],
        tools=tools,
        previous_response_id=first["id"],
    )
    assert (kinds(refused), says(refused)) == (["message"], "Then not.")
    ignored = made(server, "What now? has not approved", tools=tools, previous_response_id=first["id"])
    assert says(ignored) == "Then not."
    for item, tools_now, before in (
        (answer | {"approval_request_id": "mcpr_1"}, tools, first),
        (answer, tools, done),
        (answer, [mcp("web")], first),
        (answer | {"approve": "yes"}, tools, first),
    ):
        reply = send(server, [item], tools=tools_now, previous_response_id=before["id"])
        assert reply.json["error"]["param"].startswith("input["), reply.text
        reply.error(400)


@pytest.mark.parametrize(
    ("asked", "waits"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"tool_names": ["erase"]}}, True),
        ({"always": {"tool_names": ["erase"]}}, False),
        ({"always": {"tool_names": ["add"]}}, True),
        ({"never": {"read_only": True}}, False),
        ({"always": {"read_only": False}}, False),
        (None, True),
    ],
)
def test_which_calls_wait(server: LiveServer, asked: Any, waits: bool) -> None:
    found = made(
        server, "two and three", tools=[mcp(require_approval=asked, allowed_tools={"read_only": True})]
    )
    assert ("mcp_approval_request" in kinds(found)) is waits
    assert [tool["name"] for tool in found["output"][0]["tools"]] == ["add"]


def test_functions_of_the_client_end_the_turn(server: LiveServer) -> None:
    tools = [mcp(), FLAG]
    first = made(server, "my own", tools=tools)
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert first["output"][1]["status"] == "completed"
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "yes"}
    assert says(made(server, [output], tools=tools, previous_response_id=first["id"])) == "It is 5."


def test_choices(server: LiveServer) -> None:
    """A choice of a server's tool is enforced, for the first call."""
    for choice in (
        {"type": "mcp", "server_label": "calc", "name": "add"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "mcp", "server_label": "calc", "name": "add"}],
        },
    ):
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 400, "tools": [
            mcp(require_approval="always"), FLAG]}  # fmt: skip
        found = made(server, "anything", temperature=0, **fields)
        assert found["output"][-1]["type"] == "mcp_approval_request" or found["status"] == "incomplete"
        assert found["tool_choice"] == choice
    assert kinds(made(server, "counts", tool_choice="required"))[-1] == "message"
    banned = send(server, "two and three", tool_choice="none")
    banned.error(400)  # the script says what may not be said


def test_rounds_and_calls_are_limited(server: LiveServer) -> None:
    """The last answer may call nothing that runs here."""
    found = made(server, "counts")
    assert [json.loads(ran["arguments"])["b"] for ran in calls(found)] == [0, 1, 2]
    assert says(found) == "Three."
    send(server, "counts", max_tool_calls=2).error(400)  # a third call is what the script says
    cut = made(server, "both at once", max_tool_calls=1)
    assert [ran["status"] for ran in calls(cut)] == ["completed", "failed"]
    assert "max_tool_calls" in calls(cut)[1]["error"]["message"]
    short = made(server, "two and three", max_output_tokens=70)
    assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert short["usage"]["output_tokens"] <= 70
    half = made(server, "two and three", max_output_tokens=50)
    assert [ran["status"] for ran in calls(half)] in ([], ["incomplete"])
    send(server, "counts", max_tool_calls=0).error(400, None, "max_tool_calls")


@pytest.mark.parametrize(
    ("said", "kind", "text", "then"),
    [
        ("fails", "mcp_tool_execution_error", "it is broken", "It failed."),
        ("dies", "mcp_protocol_error", "has ended", "It died."),
        ("no numbers", "mcp_protocol_error", "a is no integer", "No integer."),
    ],
)
def test_calls_that_fail(server: LiveServer, said: str, kind: str, text: str, then: str) -> None:
    """The item says what went wrong, so does the model; the server goes on, and so does the next call."""
    found = made(server, said)
    (ran,) = calls(found)
    assert (ran["status"], ran["output"], ran["error"]["type"]) == ("failed", None, kind)
    assert text in json.dumps(ran["error"])
    assert says(found) == then
    assert says(made(server, "two and three")) == "It is 5."


def test_a_call_that_is_late(server: LiveServer) -> None:
    """It fails, after a stream has shown that it lives."""
    tool = {"name": "sleep", "input_schema": {"type": "object"}}
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "hasty", "tools": [tool]}
    said = [listed, {"role": "user", "content": "sleeps"}]
    reply = send(server, said, stream=True, tools=[mcp("hasty")])
    assert reply.body.count(PING) >= 1
    found = fold(events(reply.body.replace(PING, b"")))
    (ran,) = calls(found)
    assert (ran["status"], ran["error"]["code"]) == ("failed", -32001)
    assert ran["error"]["message"] == "MCP server 'hasty' did not answer within 1.2 s"
    assert says(found) == "It sleeps."


def test_one_that_is_late_gets_another_process() -> None:
    """A call that takes too long does not end the others of its session."""
    command = (sys.executable, str(PIPES), "pipes", "asks")
    given = ServerSettings(name="calc", command=command, tools=frozenset(["*"]), timeout=1000)
    hasty = replace(given, timeout=0.5)
    tools, counts = ToolServers(McpSettings((given,))), ToolServerCounts()

    async def ask() -> tuple[str, str]:
        before = await tools.call("", given, counts, "process", {})
        with pytest.raises(McpError, match=r"did not answer within 0\.5 s"):
            await tools.call("", hasty, counts, "sleep", {"seconds": 1000})
        return before.text, (await tools.call("", given, counts, "process", {})).text

    before, after = asyncio.run(ask())
    assert before != after
    tools.close()


def test_a_server_that_forgets_its_sessions() -> None:
    """It is asked again, in a new session."""
    web = HttpToolServer("forgets")
    given = ServerSettings(name="web", url=web.url, tools=frozenset(["add"]))
    tools, counts = ToolServers(McpSettings((given,))), ToolServerCounts()

    async def ask() -> list[str]:
        made = [await tools.call("", given, counts, "add", {"a": 1, "b": n}) for n in range(12)]
        return [found.text.split()[0] for found in made]

    assert asyncio.run(ask()) == [str(1 + n) for n in range(12)]
    tools.close()
    methods = [method for method, _ in web.seen]
    assert methods.count("initialize") > 1
    assert methods.count("tools/call") > 12
    web.close()


def test_long_results_are_cut(server: LiveServer) -> None:
    (ran,) = calls(made(server, "is long", tools=[mcp(allowed_tools=["long"])], max_output_tokens=100))
    assert len(ran["output"]) < 2 * 4096 + 100
    assert ran["output"].endswith("more characters were cut off]")


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("refuses", "HTTP status 403"),
        ("huge", "sent a message of more than 300000 bytes"),
        ("closed", None),
    ],
)
def test_servers_that_cannot_be_listed(server: LiveServer, label: str, text: str | None) -> None:
    found = made(server, "[tool] 5", tools=[mcp(label), FLAG])
    listed, answer = found["output"]
    assert listed["tools"] == []
    assert (text is None) is (listed["error"] is None)
    assert text is None or text in listed["error"]
    assert answer["content"][0]["text"] == "It is 5."
    send(server, "x", tools=[mcp(label)], tool_choice="required").error(424, None, "tool_choice")
    again = made(server, "[tool] 5", tools=[mcp(label), FLAG], previous_response_id=found["id"])
    assert ("mcp_list_tools" in kinds(again)) is (text is not None)  # asked once more


BAD: list[tuple[dict[str, Any], str]] = [
    ({"server_label": "unknown"}, "tools[0].server_label"),
    ({"server_label": "a b"}, "tools[0].server_label"),
    ({"server_label": "calc", "server_url": "http://127.0.0.1:1/mcp"}, "tools[0].server_url"),
    ({"server_label": "calc", "server_url": "http://169.254.169.254/"}, "tools[0].server_url"),
    ({"server_label": "calc", "headers": {"Authorization": "x"}}, "tools[0].headers"),
    ({"server_label": "calc", "authorization": "x"}, "tools[0].authorization"),
    ({"server_label": "calc", "connector_id": "connector_dropbox"}, "tools[0].connector_id"),
    ({"server_label": "calc", "tunnel_id": "x"}, "tools[0].tunnel_id"),
    ({"server_label": "calc", "defer_loading": True}, "tools[0].defer_loading"),
    ({"server_label": "calc", "require_approval": "sometimes"}, "tools[0].require_approval"),
    ({"server_label": "calc", "allowed_tools": "add"}, "tools[0].allowed_tools"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = send(server, "two and three", tools=[{"type": "mcp"} | fields])
    assert reply.json["error"]["param"] == param, reply.text
    reply.error(400)


def test_more_wrong_requests(server: LiveServer, folder: Path) -> None:
    send(server, "x", tools=[mcp(), mcp()]).error(400, None, "tools[1].server_label")
    choice = {"type": "mcp", "server_label": "web"}
    send(server, "x", tool_choice=choice).error(400, None, "tool_choice")
    send(server, "x", temperature=-1).error(400, None, "temperature")
    send(server, [{"type": "mcp_call", "id": "a"}]).error(400, None, "input[0].server_label")
    send(server, [{"type": "mcp_thing", "id": "a"}]).error(400, None, "input[0].type")
    for tools in ([], [mcp()]):  # lists and objects in place of names
        send(server, [{"type": "mcp_approval_request", "id": ["a"]}], tools=tools).error(
            400, None, "input[0].id"
        )
        call = {"type": "mcp_call", "id": "a", "server_label": "calc", "name": "add", "arguments": "{}"}
        asked = [call | {"approval_request_id": {}}, {"role": "user", "content": "x"}]
        assert (
            send(server, asked, tools=tools, max_output_tokens=9).status == 200
        )  # one that nobody asked for
    listed = {"type": "mcp_list_tools", "server_label": "calc", "tools": [{"name": 1}]}
    assert send(server, [listed, {"role": "user", "content": "x"}]).json["error"]["param"] == "input[0]"
    flag = {"type": "function", "name": "flag", "parameters": {"type": "array"}}
    send(server, "x", tools=[mcp(), flag]).error(400, None, "tools[1].parameters.type")
    with serving(folder) as plain:
        plain.post("/v1/responses", {"input": "x", "tools": [mcp()]}).error(400, None, "tools[0]")


def test_a_list_of_the_client_opens_nothing(server: LiveServer, web: HttpToolServer) -> None:
    """Items may say what they like: the operator's list decides."""
    tool = {"name": "erase", "input_schema": {"type": "object"}}
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "web", "tools": [tool]}
    asked = {
        "type": "mcp_approval_request", "id": "mcpr_1", "server_label": "web", "name": "erase", "arguments": "{}"
    }  # fmt: skip
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    reply = send(server, [listed, asked, answer], tools=[mcp("web")])
    reply.error(400, None, "input[2].approval_request_id")
    seen = len(web.seen)
    send(
        server, [listed, {"role": "user", "content": "x"}], tools=[mcp("web")], tool_choice="required"
    ).error(424)
    assert len(web.seen) == seen


def test_urls_are_those_of_the_operator(server: LiveServer, web: HttpToolServer) -> None:
    found = made(server, "two and three", tools=[mcp("mine", server_url=web.url)])
    assert calls(found)[0]["server_label"] == "mine"
    assert says(found) == "It is 5."


def test_names_that_two_have(server: LiveServer) -> None:
    """A function of the client keeps its name; tools of servers get their label in front."""
    own = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    found = made(server, "two and three", tools=[mcp(), own])
    assert kinds(found)[-1] == "function_call"


def test_keys_have_their_own_sessions(server: LiveServer) -> None:
    pids = [calls(made(server, "which process", key, max_output_tokens=60))[0] for key in (KEY, OTHER, KEY)]
    one, two, three = (ran["output"] for ran in pids)
    assert one == three
    assert one != two


def test_background_and_cancel(server: LiveServer) -> None:
    begun = made(server, "two and three", background=True)
    assert (begun["status"], begun["output"]) == ("queued", [])
    path = f"/v1/responses/{begun['id']}"
    server.wait(lambda: server.get(path, KEY).json["status"] == "completed")
    assert says(server.get(path, KEY).json) == "It is 5."
    slow = made(server, "never wakes", background=True, tools=[mcp("slow")])
    running = server.http.context.tools._running  # type: ignore[union-attr]
    counted = server.http.context.metrics.tools.requests
    server.wait(lambda: counted["slow", "list", "done"] == 1 and running.total() == 1)
    ended = server.request("POST", f"/v1/responses/{slow['id']}/cancel", headers=KEY).json
    assert ended["status"] == "cancelled"
    server.wait(lambda: running.total() == 0)
    assert counted["slow", "call", "cancelled"] == 1
    failed = made(server, "x", background=True, tools=[mcp("refuses")], tool_choice="required")
    path = f"/v1/responses/{failed['id']}"
    server.wait(lambda: server.get(path, KEY).json["status"] == "failed")
    assert server.get(path, KEY).json["error"]["code"] == "mcp_tools_not_found"


def test_hung_calls_keep_nobody_else_waiting(server: LiveServer) -> None:
    """Those of another key, and to another server, go on. A client that leaves ends its calls."""
    body = {"model": "tiny", "input": "never wakes", "tools": [mcp("slow")], "stream": True}
    socks = []
    for _ in range(12):
        sock = server.connect()
        data = json.dumps(body).encode()
        head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        socks.append(sock)
    running = server.http.context.tools._running  # type: ignore[union-attr]
    server.wait(lambda: running["", "slow"] >= 4 or any(count >= 4 for count in running.values()))
    for key in (KEY, OTHER):
        assert says(made(server, "two and three", key)) == "It is 5."
    for sock in socks:
        sock.close()
    server.wait(lambda: running.total() == 0)
    server.wait(server.idle)
    memory = server.http.context.memory
    server.wait(lambda: memory.bodies.used == memory.work.used == memory.answers.used == 0)


def test_metrics_and_the_plan(server: LiveServer, web: HttpToolServer, tmp_path: Path) -> None:
    made(server, "two and three", tools=[mcp("web")])
    with unittest.mock.patch("quire.server.exposition.CACHE_SECONDS", -1.0):
        lines = server.get("/metrics", KEY).text.splitlines()
    for name, labels in (
        ("quire_tool_server_requests_total", ('server="web"', 'kind="call"', 'outcome="done"')),
        ("quire_tool_server_seconds_count", ('server="web"',)),
    ):
        (found,) = [line for line in lines if line.startswith(name) and all(text in line for text in labels)]
        assert float(found.rpartition(" ")[2]) >= 1
    path = servers_file(tmp_path, {"web": {"url": web.url}}, calls=3, message_bytes=10_000)
    planned = server_memory(ServingConfig(mcp=path))["tool_servers"]
    assert planned == McpSettings((), calls=3, message_bytes=10_000).memory > 3 * 7 * 10_000
    assert "tool_servers" not in server_memory(ServingConfig())


def test_the_official_client(server: LiveServer) -> None:
    """Created, streamed, approved, continued."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    tool: Any = {"type": "mcp", "server_label": "calc", "require_approval": "never", "allowed_tools": ["add"]}
    found = client.responses.create(model="tiny", input="two and three", tools=[tool])
    assert found.output_text.endswith("It is 5.")
    assert [type(item).__name__ for item in found.output] == [
        "McpListTools", "ResponseOutputMessage", "McpCall", "ResponseOutputMessage"
    ]  # fmt: skip
    with client.responses.stream(model="tiny", input="two and three", tools=[tool]) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == found.output_text
    for name in ("mcp_list_tools.completed", "mcp_call_arguments.delta", "mcp_call.completed"):
        assert f"response.{name}" in seen
    tool |= {"require_approval": "always"}
    asked = client.responses.create(model="tiny", input="two and three", tools=[tool])
    request = asked.output[-1]
    assert request.type == "mcp_approval_request"
    answer: Any = {"type": "mcp_approval_response", "approve": True, "approval_request_id": request.id}
    done = client.responses.create(model="tiny", input=[answer], tools=[tool], previous_response_id=asked.id)
    assert done.output_text == "It is 5."
    failing = client.responses.create(model="tiny", input="fails", tools=[tool | {
        "require_approval": "never", "allowed_tools": ["fail"]}])  # fmt: skip
    (ran,) = (item for item in failing.output if item.type == "mcp_call")
    assert ran.error is not None
    assert ran.error.type == "mcp_tool_execution_error"
