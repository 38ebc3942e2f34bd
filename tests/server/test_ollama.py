"""Ollama's API over HTTP: its fields, its lines, its errors. Examples are those of its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from helpers.dialects import SAYS, TOOLS, fold_lines, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving

TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with (
        script.played(),
        serving(folder, {"max_model_len": 2048}, served_model_name=("tiny",), **options) as live,
    ):
        yield live


def chat(server: LiveServer, text: str = "plain", **fields: Any) -> Reply:
    return server.post(
        "/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields
    )


def generate(server: LiveServer, prompt: str = "plain", **fields: Any) -> Reply:
    return server.post("/api/generate", {"model": "tiny:latest", "prompt": prompt} | fields)


def error(reply: Reply, status: int, text: str) -> None:
    assert reply.status == status, reply.text
    assert set(reply.json) == {"error"}
    assert text in reply.json["error"]


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what two requests do not have in common."""
    assert datetime.fromisoformat(answer.pop("created_at"))
    times = [answer.pop(name) for name in TIMES]
    assert all(isinstance(time, int) for time in times)
    assert times[0] >= times[2] + times[3] > 0
    for call in answer.get("message", {}).get("tool_calls", ()):
        call.pop("id")
    return answer


@pytest.mark.parametrize("key", SAYS)
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    for ask, fields in ((chat, {"tools": TOOLS}), (generate, {})):
        whole = ask(server, key, stream=False, **fields)
        reply = ask(server, key, **fields)
        assert reply.headers["content-type"] == "application/x-ndjson"
        assert timeless(fold_lines(reply.body)) == timeless(whole.json)


def test_what_is_said(server: LiveServer) -> None:
    found = chat(server, "ponders", tools=TOOLS, stream=False).json
    message = found["message"]
    assert message["thinking"].strip() == "The weather."
    assert message["tool_calls"][0]["function"] == {
        "index": 0, "name": "get_weather", "arguments": {"city": 'Paris, "Île"'},
    }  # fmt: skip
    assert (found["done"], found["done_reason"], found["model"]) == (True, "stop", "tiny")
    said = generate(server, stream=False).json
    assert (said["response"], said["model"]) == (SAYS["plain"], "tiny:latest")
    assert said["eval_count"] == len(SAYS["plain"].encode()) + 1
    cut = generate(server, stream=False, options={"num_predict": 4}).json
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 4)


def test_a_raw_prompt_is_continued(server: LiveServer) -> None:
    raw = generate(server, "thinks", raw=True, stream=False).json
    assert raw["response"] == "\nIs it 4?\n\n\nIt is 4."  # without control tokens
    assert raw["prompt_eval_count"] == len("thinks")
    error(generate(server, raw=True, system="x"), 400, "system: not part of a raw prompt")


def test_tokens_have_their_logprobs(server: LiveServer) -> None:
    """The same as those of OpenAI's chat, whole and streamed, where the answer is read in parts too."""
    for key, fields in (("plain", {}), ("ponders", {"tools": TOOLS}), ("two calls", {"tools": TOOLS})):
        asked = {"logprobs": True, "top_logprobs": 2, **fields}
        whole = chat(server, key, stream=False, **asked).json
        same = server.chat(key, max_tokens=None, **asked).json["choices"][0]["logprobs"]["content"]
        assert whole["logprobs"] == same
        assert len(same) == whole["eval_count"]
        assert {len(score["top_logprobs"]) for score in same} == {2}
        assert timeless(fold_lines(chat(server, key, **asked).body)) == timeless(whole)
    plain = generate(server, logprobs=True, stream=False).json["logprobs"]
    assert b"".join(bytes(score["bytes"]) for score in plain).startswith(SAYS["plain"].encode())
    assert not any(score["top_logprobs"] for score in plain)
    assert fold_lines(generate(server, logprobs=True).body)["logprobs"] == plain


def test_a_conversation_with_calls_is_that_of_a_chat(server: LiveServer) -> None:
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "thinking": "Look.", "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_name": "get_weather", "content": "21"},
    ]
    count = server.post(
        "/api/chat", {"messages": turns, "tools": TOOLS, "stream": False, "options": {"num_predict": 1}}
    ).json["prompt_eval_count"]
    call = {"id": "call00200", "type": "function", "function": function}
    same = [
        *turns[:2],
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00200", "content": "21", "name": "get_weather"},
    ]
    rendered = server.post("/v1/chat/completions/render", {"messages": same, "tools": TOOLS}).json
    assert rendered["count"] == count
    assert "21 for call00200" in rendered["prompt"]


def test_options_are_parameters(server: LiveServer) -> None:
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3, "num_predict": 12,
               "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}  # fmt: skip
    said = generate(server, "anything", raw=True, stream=False, options=options).json["response"]
    same = options | {"max_tokens": 12, "repetition_penalty": 1.1, "prompt": "anything"}
    for name in ("num_predict", "repeat_penalty"):
        same.pop(name)
    assert server.post("/v1/completions", same).json["choices"][0]["text"] == said
    stopped = generate(server, stream=False, options={"stop": ["text"]}).json
    assert (stopped["response"], stopped["done_reason"]) == ("Just ", "stop")


def test_nothing_is_truncated(server: LiveServer) -> None:
    size = chat(server, stream=False).json["prompt_eval_count"]
    cut = chat(server, stream=False, options={"num_ctx": size + 3}).json
    assert (cut["eval_count"], cut["done_reason"]) == (3, "length")
    error(chat(server, options={"num_ctx": size}), 400, "leave no room")
    error(generate(server, options={"num_ctx": 3}), 400, "prompt: ")
    error(chat(server, options={"num_ctx": 2**20}), 400, "options.num_ctx: 1048576 is not in [2, 2048]")
    error(chat(server, options={"num_ctx": size + 3, "num_predict": 9}), 400, "options.num_predict: ")


def test_format_and_think(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    said = generate(server, "anything", format=schema, raw=True, stream=False).json["response"]
    assert set(json.loads(said)) == {"on"}
    error(generate(server, format="xml"), 400, "format: ")
    thought = chat(server, "anything", think=True, stream=False, options={"num_predict": 30}).json["message"]
    assert thought["thinking"]
    off = chat(server, "plain", think=False, stream=False).json["message"]
    assert off == {"role": "assistant", "content": SAYS["plain"]}
    error(chat(server, think="high"), 400, "think: 'high'")


def test_the_model_is_loaded(server: LiveServer) -> None:
    for reply in (chat(server, messages=[]), generate(server, "", keep_alive="5m")):
        assert reply.json["done_reason"] == "load"
    error(generate(server, "", keep_alive=0), 400, "keep_alive: ")
    error(generate(server, "", keep_alive="0s"), 400, "keep_alive: ")
    for path in ("/api/tags", "/api/ps"):
        (model,) = server.get(path).json["models"]
        assert (model["name"], model["context_length"]) == ("tiny", 2048)
    assert server.get("/api/version").json == server.get("/version").json


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model: 'other'"),
    ({"options": {"num_gpu": 1}}, "num_gpu"),
    ({"options": {"mirostat": 3}}, "options.mirostat: 3 is not an integer in [0, 2]"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n: "),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z: not supported, unless it is 1"),
    ({"options": {"temperature": -1}}, "options.temperature: "),
    ({"options": {"top_p": 0}}, "options.top_p: "),
    ({"options": {"num_predict": 0}}, "options.num_predict: "),
    ({"options": {"stop": "x" * 10_000}}, "options.stop"),
    ({"truncate": True}, "truncate: not supported"),
    ({"shift": True}, "shift: not supported"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name: "),
    ({"template": "{{ .Prompt }}"}, "template: "),
    ({"logprobs": 1}, "logprobs: "),
    ({"top_logprobs": 2}, "top_logprobs: needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21 is not in [0, 20]"),
    ({"format": 3}, "format: "),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], text: str) -> None:
    error(chat(server, **fields), 404 if "model" in fields else 400, text)


def test_values_that_ask_for_what_happens_anyway(server: LiveServer) -> None:
    same = {"repeat_last_n": 64, "mirostat": 2, "typical_p": 1, "tfs_z": 1, "penalize_newline": True,
            "num_keep": 4, "num_predict": -1, "num_ctx": None}  # fmt: skip
    fields = {
        "truncate": False,
        "shift": False,
        "keep_alive": -1,
        "logprobs": False,
        "context": [],
        "suffix": "",
    }
    assert generate(server, options=same, **fields).status == 200


def test_show(server: LiveServer) -> None:
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        found = server.post("/api/show", body).json
        assert found["capabilities"] == ["completion", "tools", "insert", "thinking"]
        architecture = found["details"]["family"]
        assert found["model_info"]["general.architecture"] == architecture
        assert found["model_info"][f"{architecture}.context_length"] == 2048
        assert "messages" in found["template"]
        assert datetime.fromisoformat(found["modified_at"])
    error(server.post("/api/show", {"model": "other"}), 404, "model: ")
    error(server.post("/api/show", {"model": "tiny", "system": "x"}), 400, "system: ")


def test_models_are_not_managed(server: LiveServer) -> None:
    for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
        error(
            server.post(path, {"model": "tiny"}),
            400,
            f"{path}: not done by this server",
        )
    error(server.request("DELETE", "/api/delete", b'{"model": "tiny"}'), 400, "--pull-limit")


def test_a_model_that_generates_has_no_vectors(server: LiveServer) -> None:
    error(server.post("/api/embed", {"input": "a"}), 400, "model: ")
