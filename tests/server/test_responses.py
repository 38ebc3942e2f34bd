"""OpenAI's Responses over HTTP: items, events, stored responses and those in the background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.dialects import SAYS, TOOLS, events, fold_response, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving
from quire.server.dialects.response_store import ResponseStore, StoredResponse, StoreError, prepare_file

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
KEY, OTHER = ({"authorization": f"Bearer {key}"} for key in ("k", "other"))
ON = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_key": ("k", "other")}
    with (
        script.played(),
        serving(folder, {"max_model_len": 2048}, served_model_name=("tiny",), **options) as live,
    ):
        yield live


def send(server: LiveServer, said: Any = "plain", **fields: Any) -> Reply:
    return server.post("/v1/responses", {"model": "tiny", "input": said} | fields, KEY)


def made(server: LiveServer, said: Any = "plain", **fields: Any) -> dict[str, Any]:
    reply = send(server, said, **fields)
    assert reply.status == 200, reply.text
    return dict(reply.json)


def get(server: LiveServer, path: str, key: dict[str, str] = KEY) -> Reply:
    return server.get(f"/v1/responses/{path}", key)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two responses to the same request have in common."""
    for name in ("id", "created_at", "completed_at"):
        response.pop(name)
    response["usage"].pop("input_tokens_details")
    for item in response["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return response


@pytest.mark.parametrize("key", SAYS)
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    whole = made(server, key, tools=FUNCTIONS)
    reply = send(server, key, tools=FUNCTIONS, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    streamed = fold_response(events(reply.body))
    assert get(server, streamed["id"]).json == streamed  # it is stored before its end is sent
    assert get(server, whole["id"]).json == whole
    assert without_ids(streamed) == without_ids(whole)


def test_items(server: LiveServer) -> None:
    found = made(server, "ponders", tools=FUNCTIONS)
    thought, call = found["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "The weather."}]
    assert (call["type"], call["name"], json.loads(call["arguments"])["city"]) == (
        "function_call", "get_weather", 'Paris, "Île"',
    )  # fmt: skip
    assert found["status"] == "completed"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    (message,) = made(server)["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"][0]["text"] == SAYS["plain"]
    cut = made(server, max_output_tokens=3)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][-1]["status"] == "incomplete"


def test_a_conversation_goes_on_from_the_response_before(server: LiveServer) -> None:
    first = made(server, "one call", tools=FUNCTIONS, instructions="Be brief.")
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "21"}
    linked = made(
        server, [output], tools=FUNCTIONS, previous_response_id=first["id"], instructions="Be brief."
    )
    items = [{"role": "user", "content": "one call"}, *first["output"], output]
    given = made(server, items, tools=FUNCTIONS, instructions="Be brief.")
    assert linked["usage"]["input_tokens"] == given["usage"]["input_tokens"]
    assert linked["previous_response_id"] == first["id"]
    call = first["output"][-1]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one call"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [
            {"id": call["call_id"], "type": "function",
             "function": {"name": call["name"], "arguments": call["arguments"]}}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "21"},
    ]  # fmt: skip
    rendered = server.post("/v1/chat/completions/render", {"messages": chat, "tools": TOOLS}, KEY).json
    assert rendered["count"] == given["usage"]["input_tokens"]


def test_stored_responses_belong_to_their_key(server: LiveServer) -> None:
    name = made(server, metadata={"a": "b"}, user="u")["id"]
    assert get(server, name).json["metadata"] == {"a": "b"}
    for path in (name, f"{name}/input_items", "resp_0"):
        assert get(server, path, OTHER).json["error"]["code"] == "response_not_found"
        assert get(server, path, OTHER).status == 404
    body = {"input": "x", "previous_response_id": name}
    assert server.post("/v1/responses", body, OTHER).json["error"]["code"] == "previous_response_not_found"
    assert server.request("DELETE", f"/v1/responses/{name}", headers=OTHER).status == 404
    assert server.request("POST", f"/v1/responses/{name}/cancel", headers=OTHER).status == 404
    removed = server.request("DELETE", f"/v1/responses/{name}", headers=KEY)
    assert removed.json == {"id": name, "object": "response", "deleted": True}
    assert get(server, name).status == 404
    unstored = made(server, store=False)
    assert unstored["store"] is False
    assert get(server, unstored["id"]).status == 404


def test_input_items(server: LiveServer) -> None:
    said = [{"role": "user", "content": f"plain {i}"} for i in range(5)]
    name = made(server, said)["id"]
    page = get(server, f"{name}/input_items?limit=2").json
    assert [item["content"][0]["text"] for item in page["data"]] == ["plain 4", "plain 3"]
    assert page["has_more"]
    rest = get(server, f"{name}/input_items?order=desc&after={page['last_id']}").json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["plain 2", "plain 1", "plain 0"]
    assert not rest["has_more"]
    get(server, f"{name}/input_items?limit=0").error(400, None, "limit")
    get(server, f"{name}/input_items?order=up").error(400, None, "order")
    get(server, f"{name}/input_items?after=x").error(400, None, "after")
    get(server, f"{name}/input_items?{'&'.join(f'a{i}=1' for i in range(40))}").error(400)
    get(server, f"{name}?stream=true").error(400, "unsupported_parameter", "stream")


def test_an_input_is_counted_as_a_response_counts_it(server: LiveServer) -> None:
    fields = {"instructions": "Be brief.", "tools": FUNCTIONS}
    first = made(server, "plain", **fields)
    for said, more in (("plain", fields), ("plain", {**fields, "previous_response_id": first["id"]})):
        expected = made(server, said, **more)["usage"]["input_tokens"]
        reply = server.post("/v1/responses/input_tokens", {"input": said, **more}, KEY)
        assert reply.json == {"object": "response.input_tokens", "input_tokens": expected}
    long = server.post("/v1/responses/input_tokens", {"input": "word " * 4000}, KEY)
    long.error(400, "context_length_exceeded", "input")
    for body, param in (
        ({}, "input"), ({"input": 1}, "input"), ({"input": "a", "model": "x"}, "model"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "personality": "friendly"}, "personality"),
        ({"input": "a", "conversation": "c"}, "conversation"),
    ):  # fmt: skip
        reply = server.post("/v1/responses/input_tokens", body, KEY)
        assert (reply.status, reply.json["error"]["param"]) == (404 if param == "model" else 400, param), (
            reply.text
        )
    foreign = {"input": "a", "previous_response_id": first["id"]}
    server.post("/v1/responses/input_tokens", foreign, OTHER).error(404, None, "previous_response_id")
    server.post("/v1/responses/compact", {"model": "tiny", "input": "a"}, KEY).error(400, "unsupported_route")


def test_background(server: LiveServer) -> None:
    begun = made(server, background=True)
    assert (begun["status"], begun["output"]) == ("queued", [])
    server.wait(lambda: get(server, begun["id"]).json["status"] == "completed")
    done = get(server, begun["id"]).json
    assert done["output"][0]["content"][0]["text"] == SAYS["plain"]
    cancelled = server.request("POST", f"/v1/responses/{begun['id']}/cancel", headers=KEY)
    assert cancelled.json == done  # it had ended
    long = made(server, "anything", background=True, max_output_tokens=1900, temperature=1.0)
    ended = server.request("POST", f"/v1/responses/{long['id']}/cancel", headers=KEY).json
    assert ended["status"] in {"cancelled", "completed", "incomplete"}
    assert get(server, long["id"]).json == ended
    server.wait(server.idle)
    plain = made(server)["id"]
    server.request("POST", f"/v1/responses/{plain}/cancel", headers=KEY).error(400)
    memory = server.http.context.memory
    server.wait(lambda: memory.bodies.used == memory.answers.used == 0)


def test_text_format_and_tools(server: LiveServer) -> None:
    form = {"format": {"type": "json_schema", "name": "on", "schema": ON, "strict": True}}
    found = made(server, "anything", text=form, reasoning={"effort": "none"}, temperature=0)
    assert set(json.loads(found["output"][-1]["content"][0]["text"])) == {"on"}
    flag = {"type": "function", "name": "flag", "parameters": ON, "strict": True}
    for choice in (
        "required",
        {"type": "function", "name": "flag"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "flag"}]},
    ):
        asked = {"tools": [flag], "tool_choice": choice, "parallel_tool_calls": False}
        assert made(server, "anything", **asked)["output"][-1]["type"] == "function_call"  # fmt: skip


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": 1}]}, "input[0].call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": "x" * 3000}, "input"),
    ({"temperature": -1}, "temperature"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1/x"}}}},
        "text.format.schema",
    ),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"background": True, "stream": True}, "stream"),
    ({"background": True, "store": False}, "store"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
]


def test_tokens_have_their_logprobs(folder: Path) -> None:
    """The same as those of a chat: whole, streamed, stored, and with a stop in the middle of a character."""
    asked: dict[str, Any] = {"input": "Hi", "temperature": 0.9}
    with serving(folder, served_model_name=("tiny",)) as server:
        for length, top in ((40, 2), (1, 20), (7, 0)):
            fields = asked | {"max_output_tokens": length, "top_logprobs": top, "temperature": 0}
            if not top:
                fields["include"] = ["message.output_text.logprobs"]
            whole = server.post("/v1/responses", fields).json
            (item,) = whole["output"]
            scores = item["content"][0]["logprobs"]
            chat = server.chat("Hi", max_tokens=length, logprobs=True, top_logprobs=top, temperature=0).json
            assert scores == chat["choices"][0]["logprobs"]["content"]
            assert len(scores) == whole["usage"]["output_tokens"] == length
            streamed = fold_response(events(server.post("/v1/responses", fields | {"stream": True}).body))
            assert streamed["output"][0]["content"] == item["content"]
            assert server.get(f"/v1/responses/{streamed['id']}").json == streamed
            assert (streamed["top_logprobs"], whole["top_logprobs"]) == (top, top)
            again = {"input": [{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "So?"}]}
            assert server.post("/v1/responses", again | {"max_output_tokens": 1}).status == 200
        for top in (-1, 21):
            server.post("/v1/responses", asked | {"top_logprobs": top}).error(
                400, "invalid_value", "top_logprobs"
            )
        server.wait(server.idle)


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = send(
        server, **{"said": "plain"} | {("said" if k == "input" else k): v for k, v in fields.items()}
    )
    assert reply.json["error"]["param"].startswith(param), reply.text
    reply.error(400)


def test_the_store_keeps_its_limits(tmp_path: Path) -> None:
    prepare_file(str(tmp_path / "responses.db"))
    assert (tmp_path / "responses.db").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match=r"response_store: .* cannot be opened"):
        prepare_file(str(tmp_path / "none" / "x.db"))

    async def check() -> None:
        store = ResponseStore(str(tmp_path / "responses.db"), 1000, 1.0)
        for i in range(5):
            await store.put(
                "a", StoredResponse(f"r{i}", "completed", f"r{i - 1}" if i else None, b"i" * 100, b"b" * 200)
            )
        assert await store.get("a", "r0") is None  # the oldest have made room
        assert await store.get("a", "r1") is None
        assert await store.chain("a", "r4", 10_000) is None
        assert await store.get("b", "r4") is None
        await store.put("a", StoredResponse("r2", "completed", None, b"", b"new"))
        chain = await store.chain("a", "r4", 10_000)
        assert chain is not None
        assert [one.id for one in chain] == ["r2", "r3", "r4"]
        with pytest.raises(StoreError, match="500 bytes"):
            await store.chain("a", "r4", 500)
        with pytest.raises(StoreError, match="limit of 1000"):
            await store.put("a", StoredResponse("r9", "completed", None, b"", b"x" * 1001))
        await store.put("a", StoredResponse("r8", "in_progress", None, b"", b""))
        store.close()
        later = ResponseStore(str(tmp_path / "responses.db"), 1000, 1.0)
        assert (await later.get("a", "r2") or chain[0]).body == b"new"
        assert await later.get("a", "r8") is None  # it will not be finished
        later.close()
        expired = ResponseStore(str(tmp_path / "responses.db"), 1000, 1e-9)
        assert await expired.get("a", "r2") is None
        assert not await expired.delete("b", "r2")
        expired.close()

    asyncio.run(check())
