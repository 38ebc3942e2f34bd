"""SGLang's own API over HTTP: its fields, its events, its pages, its errors. Examples are of its documentation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.dialects import SAYS, fold_generated, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, read_all, request_bytes, serving

ADMIN = {"authorization": "Bearer boss"}
FACTS = {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency"}
INFO = {
    "model_path", "is_generation", "tokenizer_path", "preferred_sampling_params", "weight_version",
    "has_image_understanding", "has_audio_understanding",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    with (
        script.played(),
        serving(
            folder, {"max_model_len": 2048}, served_model_name=("tiny",), admin_api_key=("boss",)
        ) as live,
    ):
        yield live


def generate(server: LiveServer, text: Any = "plain", *, sampling: Any = None, **fields: Any) -> Reply:
    given = {"text": text} if text is not None else {}
    return server.post(
        "/generate", given | fields | ({} if sampling is None else {"sampling_params": sampling})
    )


def error(reply: Reply, status: int, text: str) -> None:
    assert reply.status == status, reply.text
    assert set(reply.json) == {"error"}
    assert set(reply.json["error"]) == {"message"}
    assert text in reply.json["error"]["message"]


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what two requests do not have in common."""
    assert 0 < answer["meta_info"].pop("e2e_latency") < 300
    assert answer["meta_info"].pop("id")
    answer["meta_info"].pop("cached_tokens")
    return answer


def test_whole_answer(server: LiveServer) -> None:
    found = generate(server, sampling={"temperature": 0, "max_new_tokens": 32}, rid="mine").json
    assert set(found) == {"text", "output_ids", "meta_info"}
    meta = found["meta_info"]
    assert set(meta) == FACTS
    assert (found["text"], meta["id"], meta["prompt_tokens"]) == (SAYS["plain"], "mine", 5)
    assert meta["completion_tokens"] == len(found["output_ids"]) == len(SAYS["plain"].encode()) + 1
    assert meta["finish_reason"] == {"type": "stop", "matched": found["output_ids"][-1]}
    cut = generate(server, sampling={"max_new_tokens": 4}).json
    assert (cut["text"], cut["meta_info"]["finish_reason"]) == ("Just", {"type": "length", "length": 4})
    stopped = generate(server, sampling={"stop": "text"}).json
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]["matched"]) == ("Just ", "text")
    kept = generate(server, sampling={"stop": ["text"], "no_stop_trim": True}).json
    assert kept["text"] == "Just text"
    assert (
        generate(server, "anything", sampling={"ignore_eos": True}).json["meta_info"]["completion_tokens"]
        == 128
    )


@pytest.mark.parametrize("key", SAYS)
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    whole = generate(server, key).json
    assert timeless(fold_generated(generate(server, key, stream=True).body)) == timeless(whole)


def test_prompts(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "plain"}).json["tokens"]
    whole = timeless(generate(server).json)
    assert timeless(generate(server, None, input_ids=ids).json) == whole
    for several in ({"text": ["plain", "plain"]}, {"input_ids": [ids, ids]}):
        found = server.post("/generate", several | {"rid": ["a", "b"]}).json
        assert [answer["meta_info"]["id"] for answer in found] == ["a", "b"]
        assert [timeless(answer) for answer in found] == [whole, whole]
    assert [timeless(answer) for answer in generate(server, ["plain"]).json] == [whole]
    assert len(generate(server, sampling={"n": 3, "max_new_tokens": 1}).json) == 3
    same = generate(server, ["plain", "plain"], sampling=[{"max_new_tokens": 2}] * 2).json
    assert [answer["text"] for answer in same] == ["Ju", "Ju"]
    lines = generate(server, ["plain", "thinks"], stream=True).text.split("\n\n")[:-2]
    last = {event["index"]: event["text"] for event in (json.loads(line[6:]) for line in lines)}
    assert last[0] == SAYS["plain"]
    assert set(last) == {0, 1}


def test_logprobs(server: LiveServer) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    meta = generate(server, sampling={"max_new_tokens": 3}, **asked).json["meta_info"]
    assert set(meta) - FACTS == {
        "input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs",
    }  # fmt: skip
    assert meta["input_token_logprobs"] == []
    assert [text for _, _, text in meta["output_token_logprobs"]] == [None] * 3
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    texts = generate(
        server, sampling={"max_new_tokens": 3}, return_text_in_logprobs=True, logprob_start_len=1, **asked
    ).json["meta_info"]
    assert [text for _, _, text in texts["output_token_logprobs"]] == ["J", "u", "s"]
    assert [text for _, _, text in texts["input_token_logprobs"]] == ["l", "a", "i", "n"]
    assert texts["input_token_logprobs"][0][0] is texts["input_top_logprobs"][0] is None
    values = [value for value, _, _ in texts["input_token_logprobs"][1:]]
    same = server.post(
        "/v1/completions", {"prompt": "plain", "max_tokens": 0, "echo": True, "logprobs": 0}
    ).json
    expected = same["choices"][0]["logprobs"]["token_logprobs"][2:]
    assert all(map(math.isclose, values, expected))


def test_a_prompt_is_scored(server: LiveServer) -> None:
    scored = generate(server, sampling={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0).json
    meta = scored["meta_info"]
    assert (scored["text"], scored["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
    assert len(meta["input_token_logprobs"]) == 5


def test_fields_are_parameters(server: LiveServer) -> None:
    fields = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
              "presence_penalty": 0.1, "frequency_penalty": 0.1, "ignore_eos": True}  # fmt: skip
    names = {"max_new_tokens": 12, "min_new_tokens": 3, "sampling_seed": 3}
    said = generate(server, "anything", sampling=fields | names).json["text"]
    same = {"prompt": "anything", "max_tokens": 12, "min_tokens": 3, "seed": 3} | fields
    assert server.post("/v1/completions", same).json["choices"][0]["text"] == said


def test_structures(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    for given in (schema, json.dumps(schema)):
        said = generate(server, "anything", sampling={"json_schema": given}).json["text"]
        assert set(json.loads(said)) == {"on"}
    assert (
        generate(server, "anything", sampling={"regex": "(ab)+c", "max_new_tokens": 3}).json["text"][:2]
        == "ab"
    )
    assert generate(server, "anything", sampling={"ebnf": 'root ::= "yes" | "no"'}).json["text"] in {
        "yes",
        "no",
    }
    error(generate(server, sampling={"regex": "[ab"}), 400, "sampling_params.regex: ")
    error(generate(server, sampling={"ebnf": "root ::= "}), 400, "sampling_params.ebnf: ")
    error(generate(server, sampling={"ebnf": 'root ::= "a"', "regex": "a"}), 400, "both say")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"top_p": 0}}, "sampling_params.top_p: "),
    ({"sampling": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens: "),
    ({"sampling": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens: "),
    ({"sampling": {"n": 0}}, "sampling_params.n: "),
    ({"sampling": {"stop": "x" * 10_000}}, "sampling_params.stop"),
    ({"sampling": {"spaces_between_special_tokens": False}}, "sampling_params.spaces_between_special_tokens"),
    ({"sampling": {"custom_params": {}}}, "sampling_params.custom_params"),
    ({"sampling": {"mirostat": 2}}, "unknown field `mirostat`"),
    ({"sampling": [{"n": 1}, {"n": 2}]}, "sampling_params: must be equal"),
    ({"text": None}, "send the prompt of one API"),
    ({"input_ids": [1]}, "text: set exactly one"),
    ({"text": []}, "text: is empty"),
    ({"text": None, "input_ids": [10**6]}, "input_ids: 1000000 is not a token id"),
    ({"rid": ["a", "b"]}, "rid: 2 ids for 1 prompts"),
    ({"rid": "é"}, "rid: "),
    ({"top_logprobs_num": 2}, "top_logprobs_num: needs return_logprob"),
    ({"logprob_start_len": 2}, "logprob_start_len: needs return_logprob"),
    ({"return_logprob": True, "logprob_start_len": 5}, "logprob_start_len: 5 is not below the 5 tokens"),
    ({"return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num: "),
    ({"return_logprob": True, "stream": True}, "stream: not supported with return_logprob"),
    ({"sampling": {"max_new_tokens": 0}, "stream": True}, "stream: nothing to stream"),
    ({"image_data": "x.png"}, "image_data: "),
    ({"lora_id": "x"}, "lora_id: "),
    ({"return_hidden_states": True}, "return_hidden_states: "),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], text: str) -> None:
    error(generate(server, **fields), 400, text)


def test_errors_have_its_form(server: LiveServer) -> None:
    error(generate(server, model="other"), 404, "model: 'other'")
    error(generate(server, "x" * 3000), 400, "text: 3000 tokens leave no room")
    error(server.get("/generate"), 405, "use OPTIONS, POST")
    body = {"text": "plain", "stream": True}
    with server.connect() as sock:
        sock.sendall(request_bytes("/generate", body, version="1.0"))
        assert b"stream: not over HTTP/1.0" in read_all(sock)


def test_pages(server: LiveServer) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = server.get(path).json
        assert set(found) == INFO
        assert (found["model_path"], found["is_generation"]) == ("tiny", True)
        assert found["preferred_sampling_params"] is None
    reply = server.get("/health_generate")
    assert (reply.status, reply.body) == (200, b"")


def test_caches_are_flushed_by_administrators(server: LiveServer) -> None:
    prompt = "a prompt of some blocks " * 4
    cached = [
        generate(server, prompt, sampling={"max_new_tokens": 1}).json["meta_info"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[1] > cached[0]
    for method in ("GET", "POST"):
        error(server.request(method, "/flush_cache"), 401, "administrator")
    for method in ("GET", "POST"):
        reply = server.request(method, "/flush_cache", headers=ADMIN)
        assert (reply.status, reply.text) == (200, "Cache flushed.\n")
    again = generate(server, prompt, sampling={"max_new_tokens": 1}).json["meta_info"]
    assert again["cached_tokens"] == 0


def test_the_state_is_shown_to_administrators(server: LiveServer) -> None:
    error(server.get("/get_server_info"), 401, "administrator")
    found = server.get("/get_server_info", ADMIN).json
    assert (found["max_model_len"], found["served_model_name"]) == (2048, ["tiny"])
    assert found["internal_states"][0]["running"] == 0
    assert "boss" not in json.dumps(found)


def test_it_shares_its_path(folder: Path) -> None:
    with serving(folder, api=("sglang",)) as live:
        for path in ("/flush_cache", "/get_server_info"):
            error(live.get(path), 404, "--admin-api-key")
        assert set(live.post("/generate", {"text": "a"}).json) == {"text", "output_ids", "meta_info"}
        assert live.post("/tokenize", {"prompt": "a"}).status == 200
        live.post("/v1/completions", {"prompt": "a"}).error(404)
