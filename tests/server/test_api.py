"""The API's answers: shapes, streams, logprobs, tokens; streamed and complete answers are equal."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import PROBES, LiveServer, request_bytes, serving, stream_text
from helpers.speculating import costs_without_a_clock

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def _drafts_run_by_no_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        costs_without_a_clock(patch)
        yield


def test_chat_shape(server: LiveServer) -> None:
    reply = server.chat(**GREEDY)
    body = reply.json
    assert reply.status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].startswith("fp_")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    prompt = len("[user] Hello\n[assistant] ")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }
    assert "timings" not in body
    assert "prompt_logprobs" not in body


def test_a_repeated_prompt_is_cached(server: LiveServer) -> None:
    text = "a prompt of three blocks, or a little more than that"
    first, second = (server.chat(text, **GREEDY).json for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    salted = server.chat(text, cache_salt="mine", **GREEDY).json
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"] == first["choices"]


def test_a_predicted_answer_is_the_same_and_its_tokens_are_counted(server: LiveServer) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "timings": True}
    plain = server.chat(**asked).json
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": part} for part in (text[:9], text[9:])]):
        body = server.chat(prediction={"type": "content", "content": content}, **asked).json
        assert body["choices"] == plain["choices"]
        details, timings = body["usage"]["completion_tokens_details"], body["timings"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted > 0
        assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (accepted + rejected, accepted)
        assert body["usage"]["completion_tokens"] == 60
    streamed = server.chat(
        prediction={"type": "content", "content": text},
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    assert stream_text(streamed) == {0: text}
    assert streamed.events[-2]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    for content in ("", [], "nothing of the kind"):
        body = server.chat(prediction={"type": "content", "content": content}, **asked).json
        assert body["choices"] == plain["choices"]
        assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] < 10
    assert "draft_n" not in plain["timings"]


def test_a_completion_takes_a_prediction(server: LiveServer) -> None:
    asked: dict[str, Any] = {"temperature": 0.5, "seed": 3, "max_tokens": 40, "n": 2, "logprobs": 2}
    plain = server.complete(["Hello", "Good"], **asked).json
    predicted = {"type": "content", "content": plain["choices"][0]["text"]}
    body = server.complete(["Hello", "Good"], prediction=predicted, **asked).json
    assert body["choices"] == plain["choices"]
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_chat_stream_shape(server: LiveServer) -> None:
    reply = server.chat(stream=True, stream_options={"include_usage": True}, **GREEDY)
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert reply.headers["cache-control"] == "no-cache"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    without = server.chat(stream=True, **GREEDY).events
    assert all("usage" not in chunk for chunk in without[:-1])
    assert all(chunk["choices"] for chunk in without[:-1])


def test_usage_can_end_every_stream(folder: Path) -> None:
    drafts = {"speculate": "ngram", "speculation_acceptance": "typical"}
    with serving(folder, drafts, enable_force_include_usage=True) as forced:
        for reply in (forced.chat(stream=True, max_tokens=3), forced.complete(stream=True, max_tokens=3)):
            *chunks, usage, _ = reply.events
            assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 3
            assert usage["usage"]["speculation"] == "typical"
            assert all(chunk["usage"] is None for chunk in chunks)
        assert 'quire_spec_decode_info{acceptance="typical"' in forced.get("/metrics").text


def test_several_samples_stream_interleaved(server: LiveServer) -> None:
    fields = {"n": 3, "seed": 5, "max_tokens": 20, "temperature": 1.2}
    whole = server.chat(**fields).json
    streamed = server.chat(stream=True, **fields)
    assert stream_text(streamed) == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert whole["usage"]["completion_tokens"] <= 60


def test_prompts_of_every_kind(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "abc"}).json["tokens"]
    single = server.complete("abc", **GREEDY).json["choices"][0]["text"]
    assert server.complete(ids, **GREEDY).json["choices"][0]["text"] == single
    several = server.complete(["abc", "xyz"], n=2, seed=1, **(GREEDY | {"temperature": 1.0})).json
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
    lists = server.complete([ids, ids], **GREEDY).json["choices"]
    assert [c["text"] for c in lists] == [single, single]
    streamed = server.complete(["abc", "xyz"], n=2, seed=1, stream=True, **(GREEDY | {"temperature": 1.0}))
    assert stream_text(streamed) == {c["index"]: c["text"] for c in several["choices"]}


def test_completion_defaults_to_sixteen_tokens(server: LiveServer) -> None:
    assert server.complete(ignore_eos=True).json["usage"]["completion_tokens"] == 16
    assert server.complete(ignore_eos=True, max_tokens=None).json["usage"]["completion_tokens"] == 16


def test_chat_defaults_to_the_window(server: LiveServer) -> None:
    body = server.chat(ignore_eos=True).json
    assert body["usage"]["total_tokens"] == 200
    assert body["choices"][0]["finish_reason"] == "length"


def test_echo_and_logprobs(server: LiveServer) -> None:
    body = server.complete("hello there", echo=True, logprobs=2, **(GREEDY | {"max_tokens": 3})).json
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello there")
    assert "".join(logprobs["tokens"][:11]) == "hello there"
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 14
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:12] == list(range(12))
    for token, value, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == value
        assert 2 <= len(top) <= 3
        assert max(top.values()) <= 0
    greedy = logprobs["token_logprobs"][11:]
    assert greedy == [max(top.values()) for top in logprobs["top_logprobs"][11:]]


def test_echo_without_a_token(server: LiveServer) -> None:
    """As scorers ask: the prompt with its logprobs and nothing after it."""
    asked = {"echo": True, "logprobs": 1, "temperature": 0, "n": 2, "ignore_eos": False}
    one = server.complete("hello there", max_tokens=1, **asked).json
    none = server.complete("hello there", max_tokens=0, return_token_ids=True, **asked).json
    for short, long in zip(none["choices"], one["choices"], strict=True):
        assert short["text"] == "hello there"
        assert (short["finish_reason"], short["token_ids"]) == ("length", [])
        for name, values in long["logprobs"].items():
            assert short["logprobs"][name] == values[:-1]
    assert none["usage"]["completion_tokens"] == 0
    assert none["usage"]["total_tokens"] == none["usage"]["prompt_tokens"]
    server.complete("hello there", max_tokens=0).error(400, "invalid_value", "max_tokens")
    server.complete("x", max_tokens=0, echo=True, stream=True).error(400, "unsupported_parameter", "stream")


def test_harness_style_scoring(server: LiveServer) -> None:
    """As lm-evaluation-harness asks: id lists, echo, one token, and the last token left out."""
    ids = [server.post("/tokenize", {"prompt": text}).json["tokens"] for text in ("one two", "three")]
    body = server.complete(ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234).json
    for choice, prompt in zip(body["choices"], ids, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        assert all(value is not None for value in choice["logprobs"]["token_logprobs"][1:])
    alone = server.complete(ids[1], echo=True, logprobs=1, max_tokens=1, temperature=0).json["choices"][0]
    assert alone["logprobs"] == body["choices"][1]["logprobs"]


def test_chat_logprobs(server: LiveServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, **GREEDY}
    content = server.chat(**fields).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    streamed = [
        entry
        for event in server.chat(stream=True, **fields).events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    bare = server.chat(logprobs=True, **GREEDY).json["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


def test_best_of_returns_the_most_probable_samples(server: LiveServer) -> None:
    asked = {"max_tokens": 6, "temperature": 2, "seed": 7, "ignore_eos": True}
    whole = server.complete(["hey", "you"], n=5, logprobs=0, **asked).json["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) for choice in whole]
    expected = [
        whole[i]["text"] for g in (0, 5) for i in sorted(range(g, g + 5), key=lambda i: -means[i])[:2]
    ]
    best = server.complete(["hey", "you"], n=2, best_of=5, **asked).json
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 60
    shown = server.complete("hey", best_of=5, logprobs=1, **asked).json["choices"]
    assert [choice["text"] for choice in shown] == expected[:1]
    assert len(shown[0]["logprobs"]["token_logprobs"]) == 6
    server.complete("hey", n=3, best_of=2).error(400, "invalid_value", "best_of")
    server.complete("hey", n=-3, best_of=2).error(400, "invalid_value", "n")
    server.complete("hey", best_of=2, stream=True).error(400, "unsupported_parameter", "best_of")


def test_prompt_logprobs_and_token_ids(server: LiveServer) -> None:
    fields = {"prompt_logprobs": 1, "return_token_ids": True, **GREEDY}
    body = server.complete("hey", **fields).json["choices"][0]
    assert len(body["token_ids"]) == 12
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) == 3
    for token, candidates in zip(body["prompt_token_ids"][1:], body["prompt_logprobs"][1:], strict=True):
        assert set(candidates[str(token)]) == {"logprob", "rank", "decoded_token"}
    chat = server.chat("hey", **fields).json
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    last = server.complete("hey", prompt_logprobs_start=2, echo=True, logprobs=1, **fields).json["choices"][0]
    assert last["prompt_logprobs"] == [None, None, body["prompt_logprobs"][2]]
    assert [logprob is None for logprob in last["logprobs"]["token_logprobs"][:4]] == [
        True,
        True,
        False,
        False,
    ]
    as_ids = server.complete("hey", logprobs=1, return_tokens_as_token_ids=True, **GREEDY).json["choices"][0]
    assert as_ids["logprobs"]["tokens"] == [f"token_id:{token}" for token in body["token_ids"]]


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_is_the_whole_text(server: LiveServer, seed: int) -> None:
    """Bytes at random make broken characters and stop strings that span tokens."""
    chooser = random.Random(seed)
    free = {"seed": seed, "max_tokens": 100, "temperature": 2.0, "ignore_eos": True}
    text = server.complete("go", **free).json["choices"][0]["text"]
    start = chooser.randrange(20, 60)
    for stop in (
        None,
        text[start : start + 3],
        [text[start : start + 1], text[start + 5 : start + 9], "never"],
    ):
        whole = server.complete("go", stop=stop, **free).json["choices"][0]
        streamed = server.complete("go", stop=stop, stream=True, **free)
        assert stream_text(streamed) == {0: whole["text"]}
        assert streamed.events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
        stops = [stop] if isinstance(stop, str) else stop or []
        assert not any(s in whole["text"] for s in stops)
        assert whole["finish_reason"] == ("stop" if stop else "length")
        assert text.startswith(whole["text"])
        if stop:
            assert whole["stop_reason"] in stops
            kept = server.complete("go", stop=stop, include_stop_str_in_output=True, **free).json["choices"][
                0
            ]
            assert kept["text"] == whole["text"] + whole["stop_reason"]


def test_stop_tokens(server: LiveServer) -> None:
    ids = server.complete("go", return_token_ids=True, **GREEDY).json["choices"][0]["token_ids"]
    stopped = server.complete("go", stop_token_ids=[ids[3]], return_token_ids=True, **GREEDY).json["choices"][
        0
    ]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == ids[3]
    assert stopped["token_ids"] == ids[: ids.index(ids[3]) + 1]


def test_tokens_there_and_back(server: LiveServer) -> None:
    text = "Hello, (world)"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 14
    assert found["max_model_len"] == 200
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text, "content": text}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    rendered = server.post("/v1/chat/completions/render", chat).json
    assert rendered["prompt"] == "[user] Hi\n[assistant] "
    assert rendered["token_ids"] == server.post("/tokenize", chat).json["tokens"]
    open_ended = {"messages": [{"role": "assistant", "content": "I th"}], "continue_final_message": True}
    assert server.post("/v1/chat/completions/render", open_ended).json["prompt"] == "[assistant] I th"


def test_control_tokens_in_a_users_text_are_text(server: LiveServer) -> None:
    rendered = server.post(
        "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a</s>b"}]}
    ).json
    assert 2 not in rendered["token_ids"]
    assert server.post("/detokenize", {"tokens": rendered["token_ids"]}).json["prompt"] == rendered["prompt"]
    assert 2 in server.post("/tokenize", {"prompt": "a</s>b"}).json["tokens"]


def test_variables_that_the_template_does_not_read_are_refused_by_name(server: LiveServer) -> None:
    for sent in (
        {"reasoning_effort": "low"},
        {"documents": [{"text": "x"}]},
        {"chat_template_kwargs": {"x": 1}},
    ):
        (field,) = sent
        server.chat(**sent).error(400, "invalid_value", field)


def test_models(server: LiveServer) -> None:
    listing = server.get("/v1/models").json
    assert [m["id"] for m in listing["data"]] == ["tiny", "also-tiny"]
    card = listing["data"][0]
    assert card["max_model_len"] == 200
    assert len(card["config_sha256"]) == len(card["template_sha256"]) == 64
    assert server.get("/v1/models/also-tiny").json["id"] == "also-tiny"
    server.get("/v1/models/other").error(404, "model_not_found")
    assert server.chat(model="also-tiny", **GREEDY).json["model"] == "also-tiny"


def test_probes_and_version(server: LiveServer) -> None:
    for path in (*PROBES, "/version"):
        assert server.get(path).status == 200
    head = server.request("HEAD", "/health")
    assert (head.status, head.body) == (200, b"")
    options = server.request("OPTIONS", "/v1/models")
    assert (options.status, options.headers["allow"]) == (200, "GET, HEAD, OPTIONS")
    assert not any(name.startswith("access-control") for name in options.headers)


def test_request_ids(server: LiveServer) -> None:
    reply = server.post("/tokenize", {"prompt": "a"}, {"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    for unfit in ("white space", "x" * 200, "semi;colon"):
        made = server.post("/tokenize", {"prompt": "a"}, {"x-request-id": unfit}).headers["x-request-id"]
        assert made not in {unfit, ""}
    named = server.chat(request_id="job-7", **GREEDY).json
    assert named["id"] == "chatcmpl-job-7"
    assert server.chat(request_id="job-7", **GREEDY).json["choices"] == named["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_timings_sum_to_the_whole(server: LiveServer, stream: bool) -> None:
    for headers, field in (({}, {"timings": True}), ({"x-quire-timings": "1"}, {})):
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **GREEDY, **field}
        reply = server.post("/v1/chat/completions", body, headers)
        timings = (reply.events[-2] if stream else reply.json)["timings"]
        total, parts = timings.pop("total_seconds"), timings.pop("parts")
        assert sum(parts.values()) >= total - 1e-9  # from the first byte, not from the end of the headers
        assert sum(parts.values()) == pytest.approx(total, abs=0.5)
        assert parts["decode"] == pytest.approx(timings["decode_seconds"])
        assert sum(timings.values()) == pytest.approx(total)
        assert set(timings) == {
            f"{part}_seconds" for part in ("tokenize", "queue", "prefill", "decode", "deliver")
        }
        assert all(value >= 0 for value in timings.values())
        assert timings["decode_seconds"] > 0


def test_openapi_names_every_route_and_its_types(server: LiveServer) -> None:
    from quire.server.app import ROUTES

    document = server.get("/openapi.json").json
    described = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path))
        for path, item in document["paths"].items()
        for method in item
        if method in {"get", "post", "delete"}
    }
    assert described == {(route.method, route.path) for route in ROUTES if not route.admin}
    schemas = document["components"]["schemas"]
    references = set(_references(document))
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
    assert "top_k" in schemas["ChatCompletionRequest"]["properties"]
    for item in document["paths"].values():
        for operation in (item[m] for m in ("get", "post") if m in item):
            assert "401" in operation["responses"]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [ref for item in value.values() for ref in _references(item)]
    return [ref for item in value for ref in _references(item)] if isinstance(value, list) else []


def test_http_1_0_gets_a_whole_answer(server: LiveServer) -> None:
    from helpers.server import read_all

    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **GREEDY}
    with server.connect() as sock:
        sock.sendall(request_bytes("/v1/chat/completions", body, version="1.0"))
        head, _, rest = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert f"content-length: {len(rest)}".encode() in head
    assert rest.endswith(b"data: [DONE]\n\n")


def test_expect_continue(server: LiveServer) -> None:
    whole = request_bytes(
        "/tokenize", {"prompt": "abc"}, headers="expect: 100-continue\r\nconnection: close\r\n"
    )
    head, _, body = whole.partition(b"\r\n\r\n")
    with server.connect() as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(body)
        from helpers.server import read_all

        answer = read_all(sock)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["count"] == 3


def test_tokenizer_info(server: LiveServer) -> None:
    """What vLLM's route says; clients such as lm-eval make prompts with it."""
    found = server.get("/tokenizer_info").json
    (card,) = server.get("/v1/models").json["data"][:1]
    assert found["model_max_length"] == card["max_model_len"]
    assert found["vocab_size"] > 0
    assert hashlib.sha256(found["chat_template"].encode()).hexdigest() == card["template_sha256"]
    ids = server.post("/tokenize", {"prompt": found["eos_token"], "add_special_tokens": False}).json["tokens"]
    assert len(ids) == 1
