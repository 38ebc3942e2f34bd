"""llama-server's own API over HTTP: its fields, its events, its pages, its errors. Examples are those of its README."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.dialects import SAYS, fold_completion, say_all
from helpers.scripted import Script, scripted_folder
from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving

ADMIN = {"authorization": "Bearer boss"}
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n",
    "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    say_all(script)
    options = {"max_model_len": 2048, "max_num_batched_tokens": 64}
    with (
        script.played(),
        serving(folder, options, served_model_name=("tiny",), admin_api_key=("boss",)) as live,
    ):
        yield live


def complete(server: LiveServer, prompt: Any = "plain", **fields: Any) -> Reply:
    return server.post("/completion", {"prompt": prompt} | fields)


def error(reply: Reply, status: int, kind: str, text: str) -> None:
    assert reply.status == status, reply.text
    assert set(reply.json) == {"error"}
    found = reply.json["error"]
    assert set(found) == {"code", "message", "type"}
    assert (found["code"], found["type"]) == (status, kind)
    assert text in found["message"]


def events(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-1]]


def test_whole_answer(server: LiveServer) -> None:
    found = complete(server, n_predict=128, seed=7, temperature=0.8, stop=["###"]).json
    assert found["content"] == SAYS["plain"]
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "eos", "")
    assert (found["tokens"], found["prompt"], found["model"]) == ([], "plain", "tiny")
    assert (found["tokens_evaluated"], found["truncated"], found["has_new_line"]) == (5, False, False)
    assert found["tokens_predicted"] == found["timings"]["predicted_n"] == len(SAYS["plain"].encode()) + 1
    assert set(found["timings"]) == TIMINGS
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == 5
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["n_ctx"]) == (128, 7, 2048)
    assert (settings["temperature"], settings["stop"]) == (0.8, ["###"])
    cut = complete(server, n_predict=4).json
    assert (cut["stop_type"], cut["tokens_predicted"], cut["content"]) == ("limit", 4, "Just")
    stopped = server.post("/completions", {"prompt": "plain", "stop": ["text"]}).json
    assert (stopped["stop_type"], stopped["stopping_word"], stopped["content"]) == ("word", "text", "Just ")


@pytest.mark.parametrize("key", SAYS)
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    whole = complete(server, key, return_tokens=True).json
    streamed = fold_completion(complete(server, key, stream=True).body)
    for answer in (whole, streamed):
        answer.pop("timings")
        answer.pop("tokens_cached")
        answer["generation_settings"].pop("stream")
    assert streamed == whole


def test_prompts(server: LiveServer) -> None:
    """The forms of a prompt that the README lists."""
    ids = server.post("/tokenize", {"content": "plain", "add_special": True}).json["tokens"]
    only = {"response_fields": ["content", "prompt", "index"]}
    for prompt in (ids, [*ids[:2], "ain"], {"prompt_string": "plain"}):
        assert complete(server, prompt, **only).json == {
            "content": SAYS["plain"],
            "prompt": "plain",
            "index": 0,
        }
    several = complete(
        server, ["plain", ids, [*ids[:2], "ain"], {"prompt_string": "thinks"}], n_cmpl=2, **only
    )
    assert [answer["index"] for answer in several.json] == list(range(8))
    assert [answer["prompt"] for answer in several.json] == ["plain"] * 6 + ["thinks"] * 2
    assert complete(server, ["plain"], **only).json == [
        {"content": SAYS["plain"], "prompt": "plain", "index": 0}
    ]
    ended = [event for event in events(complete(server, ["plain", "plain"], stream=True)) if event["stop"]]
    assert [event["index"] for event in ended] == [0, 1]
    error(complete(server, []), 400, "invalid_request_error", "prompt: is empty")
    error(complete(server, [1, [2]]), 400, "invalid_request_error", "prompt: a list with token ids")
    error(complete(server, [1, -2]), 400, "invalid_request_error", "prompt: -2 is not a token id")
    media = {"prompt_string": "x", "multimodal_data": ["aGk="]}
    error(complete(server, media), 400, "invalid_request_error", "multimodal_data")


def test_probabilities(server: LiveServer) -> None:
    whole = complete(server, n_probs=2, n_predict=3).json["completion_probabilities"]
    assert [entry["token"] for entry in whole] == ["J", "u", "s"]
    for entry in whole:
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert [set(token) for token in entry["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 2
    *parts, last = events(complete(server, n_probs=2, n_predict=3, stream=True))
    assert [entry for part in parts for entry in part["completion_probabilities"]] == whole
    assert "completion_probabilities" not in last


def test_response_fields_are_picked(server: LiveServer) -> None:
    names = ["content", "generation_settings/n_predict", "prompt", "none"]
    found = complete(server, n_predict=2, response_fields=names).json
    assert found == {"content": "Ju", "prompt": "plain", "generation_settings/n_predict": 2}
    *_, last = events(complete(server, n_predict=2, response_fields=["stop_type"], stream=True))
    assert last == {"stop_type": "limit"}
    assert complete(server, n_predict=2, response_fields=["none"]).json == {}


def test_a_prompt_alone(server: LiveServer) -> None:
    found = complete(server, n_predict=0, return_tokens=True, n_probs=1).json
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)
    assert (found["stop_type"], found["tokens_evaluated"]) == ("limit", 5)
    error(
        complete(server, n_predict=0, stream=True), 400, "invalid_request_error", "stream: nothing to stream"
    )


def test_progress_and_timings_of_a_stream(server: LiveServer) -> None:
    prompt = "progress " * 40  # steps of 64 tokens; events that a client has not read are one
    reply = complete(server, prompt, n_predict=3, stream=True, return_progress=True, timings_per_token=True)
    found = events(reply)
    progress = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    assert [set(one) for one in progress] == [{"total", "cache", "processed", "time_ms"}] * len(progress)
    processed = [one["processed"] for one in progress]
    assert processed == sorted(set(processed))
    assert processed[-1] == len(prompt) == progress[0]["total"]
    assert found[len(progress) :][0]["timings"]["predicted_n"] >= 1
    again = events(complete(server, prompt, n_predict=1, stream=True, return_progress=True))
    assert 0 < again[0]["prompt_progress"]["cache"] < len(prompt)
    assert again[-1]["tokens_cached"] == again[0]["prompt_progress"]["cache"]


def test_fields_are_parameters(server: LiveServer) -> None:
    fields = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repeat_penalty": 1.1,
              "presence_penalty": 0.1, "frequency_penalty": 0.1, "ignore_eos": True}  # fmt: skip
    said = complete(server, "anything", n_predict=12, **fields).json["content"]
    same = {
        "max_tokens": 12,
        "repetition_penalty": fields.pop("repeat_penalty"),
        "prompt": "anything",
    } | fields
    assert server.post("/v1/completions", same).json["choices"][0]["text"] == said


def test_biases(server: LiveServer) -> None:
    only = {
        "n_predict": 6,
        "temperature": 0,
        "response_fields": ["content", "generation_settings/logit_bias"],
    }
    (z,) = server.post("/tokenize", {"content": "z"}).json["tokens"]
    for bias in ([[z, 100]], [["z", 100]], {"z": 100}, {str(z): 100}):
        assert complete(server, "anything", logit_bias=bias, **only).json["content"] == "zzzzzz"
    never = complete(server, "anything", logit_bias=[["z", 100], ["y", 99], ["z", False]], **only).json
    assert never["content"] == "yyyyyy"
    assert {"token": z, "bias": None} in never["generation_settings/logit_bias"]
    error(complete(server, logit_bias=[[z, True]]), 400, "invalid_request_error", "logit_bias: ")
    error(complete(server, logit_bias=[[z, 200]]), 400, "invalid_request_error", "logit_bias: ")


def test_structures(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}  # fmt: skip
    assert set(json.loads(complete(server, "anything", json_schema=schema).json["content"])) == {"on"}
    said = complete(server, "anything", grammar='root ::= "yes" | "no"').json
    assert said["content"] in {"yes", "no"}
    assert said["stop_type"] == "eos"
    error(complete(server, grammar="root ::= "), 400, "invalid_request_error", "grammar: ")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature: "),
    ({"repeat_penalty": 0}, "repeat_penalty: "),
    ({"n_predict": -5}, "n_predict: "),
    ({"n_cmpl": 0}, "n_cmpl: "),
    ({"n_probs": 10**6}, "n_probs: "),
    ({"return_progress": True}, "return_progress: "),
    ({"mirostat": 3}, "mirostat: "),
    ({"cache_prompt": False}, "cache_prompt: must be true"),
    ({"id_slot": 3}, "id_slot: must be -1"),
    ({"post_sampling_probs": True}, "post_sampling_probs: "),
    ({"samplers": ["best"]}, "samplers: "),
    ({"t_max_predict_ms": 5}, "t_max_predict_ms: "),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora: 0 is not the number of an adapter; there are 0"),
    ({"max_tokens": 5}, "max_tokens: "),
    ({"prompt": 3}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), BAD)
def test_wrong_fields_are_named(server: LiveServer, fields: dict[str, Any], text: str) -> None:
    error(complete(server, **fields), 400, "invalid_request_error", text)


def test_errors_have_its_form(server: LiveServer) -> None:
    error(complete(server, model="other"), 404, "not_found_error", "model: 'other'")
    error(complete(server, n_predict=5000), 400, "exceed_context_size_error", "n_predict: ")
    error(server.get("/completion"), 405, "invalid_request_error", "use OPTIONS, POST")


def test_values_that_ask_for_what_happens_anyway(server: LiveServer) -> None:
    same = {
        "cache_prompt": True, "id_slot": -1, "n_keep": 4, "n_discard": 0, "n_indent": 0, "repeat_last_n": 64,
        "seed": -1, "n_predict": -1, "min_keep": 0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "typical_p": 1.0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"], "xtc_probability": 0,
        "xtc_threshold": 0.1, "dynatemp_range": 0, "dynatemp_exponent": 1, "lora": [], "post_sampling_probs": False,
        "repeat_penalty": 1.0, "stop": [], "logit_bias": [], "model": None,
    }  # fmt: skip
    assert complete(server, **same).json["content"] == SAYS["plain"]


def test_infills(server: LiveServer) -> None:
    fields = {"input_prefix": "def a():\n", "input_suffix": "\nreturn", "n_predict": 2}
    plain = server.post("/infill", fields).json
    assert plain["prompt"] == "<|fim_prefix|>def a():\n<|fim_suffix|>\nreturn<|fim_middle|>"
    extra = [{"filename": "b.py", "text": "x = 1"}]
    whole = server.post("/infill", fields | {"input_extra": extra, "prompt": "    y", "stream": True})
    prompt = events(whole)[-1]["prompt"]
    assert prompt == (
        "<|repo_name|>project\n<|file_sep|>b.py\nx = 1\n<|file_sep|>file\n"
        "<|fim_prefix|>def a():\n<|fim_suffix|>\nreturn<|fim_middle|>    y"
    )
    for wrong in ({}, {"filename": "ok"}, {"filename": 123, "text": "abc"}):
        error(
            server.post("/infill", fields | {"input_extra": [wrong]}),
            400,
            "invalid_request_error",
            "input_extra",
        )


def test_pages(server: LiveServer) -> None:
    props = server.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (props["model_alias"], props["total_slots"] > 0) == ("tiny", True)
    assert "add_generation_prompt" in props["chat_template"]
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.post("/apply-template", said).json == {"prompt": "[user] Hi[assistant] "}
    error(server.post("/apply-template", {}), 400, "invalid_request_error", "messages")


def test_tokens_of_a_content(server: LiveServer) -> None:
    found = server.post("/tokenize", {"content": "aá", "with_pieces": True}).json
    assert [token["piece"] for token in found["tokens"]] == ["a", [195], [161]]
    ids = [token["id"] for token in found["tokens"]]
    assert server.post("/tokenize", {"content": "aá"}).json == {"tokens": ids}
    assert server.post("/detokenize", {"tokens": ids}).json["content"] == "aá"
    marker = {"content": "<think>"}
    assert len(server.post("/tokenize", marker).json["tokens"]) == 1
    assert len(server.post("/tokenize", marker | {"parse_special": False}).json["tokens"]) == len("<think>")
    server.post("/tokenize", {"prompt": "a", "with_pieces": True}).error(400, param="with_pieces")
    server.post("/tokenize", {"content": "a", "return_token_strs": True}).error(
        400, param="return_token_strs"
    )


def test_slots_are_for_administrators(server: LiveServer) -> None:
    error(server.get("/slots"), 401, "authentication_error", "administrator")
    found = server.get("/slots", ADMIN).json
    assert [slot["id"] for slot in found] == list(range(server.get("/props").json["total_slots"]))
    assert not any(slot["is_processing"] for slot in found)


def test_slots_show_what_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = scripted_folder(tmp_path_factory.mktemp("slots") / "model")
    engine = ENDLESS | {"max_model_len": 4096, "max_num_seqs": 2}
    with serving(folder, engine, admin_api_key=("boss",), **PATIENT) as live, live.busy(1, max_tokens=4000):
        live.wait(lambda: live.engine.stats.running == 1)
        busy, idle = live.get("/slots", ADMIN).json
        assert (busy["is_processing"], busy["prompt"]) == (True, "on")
        assert busy["params"]["n_predict"] == 4000
        assert busy["next_token"]["n_remain"] + busy["next_token"]["n_decoded"] == 4000
        assert (idle["is_processing"], idle["id_task"]) == (False, -1)
        assert live.get("/slots?fail_on_no_slot=1", ADMIN).status == 200
        with live.busy(1, max_tokens=4000):
            live.wait(lambda: live.engine.stats.running == 2)
            error(live.get("/slots?fail_on_no_slot=1", ADMIN), 503, "unavailable_error", "no slot available")


def test_without_administrators_or_tokens_for_infills(server: LiveServer, folder: Any) -> None:
    with serving(folder, api=("llama-server",)) as live:
        error(live.get("/slots"), 404, "not_found_error", "--admin-api-key")
        assert "/slots" not in live.get("/openapi.json").json["paths"]
        fields = {"input_prefix": "a", "input_suffix": "b"}
        error(live.post("/infill", fields), 400, "invalid_request_error", "input_suffix: the tokenizer")
        assert live.post("/tokenize", {"content": "a"}).status == 200
