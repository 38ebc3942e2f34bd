"""Bad requests get one structured error each, at once; other clients do not notice.

A neighbour streams the same seeded answer throughout: its text never changes. At the end no block and no descriptor
is held.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.checkpoints import VOCAB
from helpers.server import GUARD, LiveServer, Neighbour, plenty, read_all, request_bytes, serving
from quire.server import json_input
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.requests import CompletionRequest
from quire.server.sampling import check_logprobs, make_ask
from quire.text.tokenizer import Tokenizer
from quire.types import SamplingParams, TokenIds

MESSAGES = [{"role": "user", "content": "Hi"}]
WINDOW = 200


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, served_model_name=("tiny",), max_body_bytes=12 << 20) as live:
        live.chat(max_tokens=2, guided_regex="ab")  # starts the compiler of grammars
        before = descriptors()
        neighbour = Neighbour(live)
        yield live
        live.wait(lambda: neighbour.rounds > 3, 60)
        neighbour.stop()
        assert neighbour.differences == []
        live.wait(live.idle)
        live.wait(lambda: descriptors() <= before)


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, "max_tokens": 2} | fields).encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hi", "max_tokens": 2} | fields).encode()


# row of the list of bad inputs, name, body, code, parameter
CHAT_BODIES: list[tuple[int, str, bytes, str, str | None]] = [
    (1, "empty", b"", "invalid_json", None),
    (1, "two bytes", b"{]", "invalid_json", None),
    (1, "not json", b"hello", "invalid_json", None),
    (1, "a list", b"[]", "invalid_type", None),
    (1, "cut short", chat()[:-3], "invalid_json", None),
    (1, "more after the end", chat() + b"x", "invalid_json", None),
    (2, "a key twice", b'{"messages":[],"temperature":0,"temperature":1}', "invalid_json", None),
    (2, "a key twice, spelled otherwise", b'{"messages":[],"n":1,"\\u006e":2}', "invalid_json", None),
    (2, "a key twice deep inside", b'{"messages":[{"role":"user","content":"a","content":"b"}]}', "invalid_json", None),
    (3, "nested arrays", b'{"messages":' + b"[" * 100_000, "invalid_json", None),
    (3, "nested objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "invalid_json", None),
    (7, "word as number", chat(temperature="hot"), "invalid_type", "temperature"),
    (7, "true as number", chat(temperature=True), "invalid_type", "temperature"),
    (7, "list as number", chat(temperature=[]), "invalid_type", "temperature"),
    (7, "object as number", chat(temperature={}), "invalid_type", "temperature"),
    (8, "NaN", b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', "invalid_json", None),
    (8, "Infinity", b'{"messages":[{"role":"user","content":"a"}],"temperature":Infinity}', "invalid_json", None),
    (8, "1e400", b'{"messages":[{"role":"user","content":"a"}],"temperature":1e400}', "invalid_type", "temperature"),
    (8, "huge temperature", chat(temperature=1e308), "invalid_value", "temperature"),
    (8, "negative temperature", chat(temperature=-1), "invalid_value", "temperature"),
    (9, "top_p 0", chat(top_p=0), "invalid_value", "top_p"),
    (9, "top_p over 1", chat(top_p=1.0001), "invalid_value", "top_p"),
    (9, "top_p negative", chat(top_p=-0.1), "invalid_value", "top_p"),
    (9, "top_k -2", chat(top_k=-2), "invalid_value", "top_k"),
    (9, "top_k fraction", chat(top_k=0.01), "invalid_type", "top_k"),
    (9, "top_k 2^40", chat(top_k=2**40), "invalid_value", "top_k"),
    (10, "max_tokens 0", chat(max_tokens=0), "invalid_value", "max_tokens"),
    (10, "max_tokens -1", chat(max_tokens=-1), "invalid_value", "max_tokens"),
    (10, "max_tokens 2^63", chat(max_tokens=2**63), "invalid_value", "max_tokens"),
    (10, "max_tokens text", chat(max_tokens="10"), "invalid_type", "max_tokens"),
    (10, "max_tokens fraction", chat(max_tokens=1.5), "invalid_type", "max_tokens"),
    (10, "max_tokens over the window", chat(max_tokens=WINDOW), "context_length_exceeded", "max_tokens"),
    (10, "max_completion_tokens over the window", chat(max_completion_tokens=WINDOW, max_tokens=None),
     "context_length_exceeded", "max_completion_tokens"),
    (10, "a chat over the window", chat(messages=[{"role": "user", "content": "x" * WINDOW}]),
     "context_length_exceeded", "messages"),
    (10, "max_completion_tokens 0", chat(max_completion_tokens=0, max_tokens=None), "invalid_value",
     "max_completion_tokens"),
    (10, "two lengths", chat(max_completion_tokens=3), "invalid_value", "max_completion_tokens"),
    (11, "n 10^9", chat(n=10**9), "invalid_value", "n"),
    (11, "n 0", chat(n=0), "invalid_value", "n"),
    (11, "best_of", chat(best_of=10**6), "unsupported_parameter", "best_of"),
    (12, "top_logprobs 21", chat(logprobs=True, top_logprobs=21), "invalid_value", "top_logprobs"),
    (12, "top_logprobs alone", chat(top_logprobs=2), "invalid_value", "top_logprobs"),
    (12, "logprobs as number", chat(logprobs=5), "invalid_type", "logprobs"),
    (13, "prompt_logprobs 10^6", chat(prompt_logprobs=10**6), "invalid_value", "prompt_logprobs"),
    (14, "10,000 stops", chat(stop=["a"] * 10_000), "invalid_value", "stop"),
    (14, "empty stop", chat(stop=""), "invalid_value", "stop"),
    (14, "1 MB stop", chat(stop="x" * 2**20), "invalid_value", "stop"),
    (16, "seed 2^64", chat(seed=2**64), "invalid_value", "seed"),
    (16, "seed -2^63-1", chat(seed=-(2**63) - 1), "invalid_value", "seed"),
    (16, "seed text", chat(seed="a"), "invalid_type", "seed"),
    (17, "bias of no token", chat(logit_bias={str(VOCAB): 1}), "invalid_value", "logit_bias"),
    (17, "bias 1e9", chat(logit_bias={"3": 1e9}), "invalid_value", "logit_bias"),
    (17, "bias of no text", chat(logit_bias={"": 1}), "invalid_value", "logit_bias"),
    (17, "bias of a long text", chat(logit_bias={"a" * 300: 1}), "invalid_value", "logit_bias"),
    (17, "bad words of many tokens", chat(bad_words=["é" * 250] * 64), "invalid_value", "bad_words"),
    (17, "an empty bad word", chat(bad_words=[""]), "invalid_value", "bad_words"),
    (17, "a bad word without tokens", chat(bad_words=["  "]), "invalid_value", "bad_words"),
    (17, "an unknown sampler", chat(samplers=["top_k", "infill"]), "invalid_value", "samplers"),
    (17, "a sampler twice", chat(samplers=["top_k", "top_k"]), "invalid_value", "samplers"),
    (17, "an empty breaker", chat(dry_sequence_breakers=[""]), "invalid_value", "dry_sequence_breakers"),
    (17, "mirostat 3", chat(mirostat=3), "invalid_value", "mirostat"),
    (17, "bias of a token twice", chat(logit_bias={"3": 1, "03": 1}), "invalid_value", "logit_bias"),
    (17, "200,000 biases", chat(logit_bias=dict.fromkeys(map(str, range(200_000)), 1)), "invalid_value", "logit_bias"),
    (18, "presence_penalty", chat(presence_penalty=1e30), "invalid_value", "presence_penalty"),
    (18, "frequency_penalty", chat(frequency_penalty=-1e30), "invalid_value", "frequency_penalty"),
    (18, "repetition_penalty 0", chat(repetition_penalty=0), "invalid_value", "repetition_penalty"),
    (18, "repetition_penalty -1", chat(repetition_penalty=-1), "invalid_value", "repetition_penalty"),
    (19, "all tokens banned", chat(banned_token_ids=list(range(VOCAB))), "invalid_value", "banned_token_ids"),
    (19, "nothing allowed", chat(allowed_token_ids=[]), "invalid_value", "allowed_token_ids"),
    (20, "no messages", chat(messages=[]), "invalid_value", "messages"),
    (20, "no content", chat(messages=[{"role": "user"}]), "invalid_value", "messages"),
    (20, "messages missing", b'{"max_tokens":1}', "invalid_type", "messages"),
    (21, "null content", chat(messages=[{"role": "user", "content": None}]), "invalid_value", "messages"),
    (21, "no role", chat(messages=[{"content": "a"}]), "invalid_value", "messages"),
    (21, "role is a number", chat(messages=[{"role": 1, "content": "a"}]), "invalid_value", "messages"),
    (21, "message is a text", chat(messages=["hello"]), "invalid_type", "messages[0]"),
    (22, "invalid UTF-8", b'{"messages":[{"role":"user","content":"\xff"}]}', "invalid_json", None),
    (22, "overlong UTF-8", b'{"messages":[{"role":"user","content":"\xc0\x80"}]}', "invalid_json", None),
    (22, "lone surrogate", b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_json", None),
    (22, "surrogate in UTF-8", b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "invalid_json", None),
    (22, "raw NUL", b'{"messages":[{"role":"user","content":"\x00"}]}', "invalid_json", None),
    (22, "byte order mark", b"\xef\xbb\xbf" + chat(), "invalid_json", None),
    (22, "stop is a surrogate", b'{"messages":[{"role":"user","content":"a"}],"stop":"\\udc00"}', "invalid_json", None),
    (24, "10 MB of text", chat(messages=[{"role": "user", "content": "word " * 2_000_000}]), "", "messages"),
    (24, "a prediction over the window", chat(prediction={"type": "content", "content": "x" * WINDOW}),
     "context_length_exceeded", "prediction"),
    (24, "10 MB of prediction", chat(prediction={"type": "content", "content": "word " * 2_000_000}), "", "prediction"),
    (7, "a prediction that is a text", chat(prediction="text"), "invalid_type", "prediction"),
    (7, "a prediction of another type", chat(prediction={"type": "text", "content": "a"}), "invalid_value",
     "prediction.type"),
    (7, "a prediction without content", chat(prediction={"type": "content"}), "invalid_type", "prediction.content"),
    (7, "a prediction of numbers", chat(prediction={"type": "content", "content": [1]}), "invalid_type",
     "prediction.content[0]"),
    (7, "a prediction of images", chat(prediction={"type": "content", "content": [{"type": "image_url"}]}),
     "invalid_value", "prediction.content[0].type"),
    (25, "1 MB of one letter", chat(messages=[{"role": "user", "content": "a" * 2**20}]), "", "messages"),
    (25, "1 MB of one emoji", chat(messages=[{"role": "user", "content": "\U0001f600" * 2**18}]), "", "messages"),
    (39, "template in the request", chat(chat_template="{{ 1 }}"), "unsupported_parameter", "chat_template"),
    (40, "tokenize as template variable", chat(chat_template_kwargs={"tokenize": True}), "invalid_value",
     "chat_template_kwargs"),
    (40, "unknown template variable", chat(chat_template_kwargs={"x": 1}), "invalid_value", "chat_template_kwargs"),
    (41, "image by address", chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]), "invalid_value", "messages"),
    (41, "image by path", chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]), "invalid_value", "messages"),
    (42, "prompt_embeds", chat(prompt_embeds="gASVAAAA"), "unsupported_parameter", "prompt_embeds"),
    (37, "tools without a template", chat(tools=[{"type": "function", "function": {"name": "f"}}]), "invalid_value",
     "tools"),
    (38, "tool_choice without tools", chat(tool_choice="required"), "invalid_value", "tool_choice"),
    (30, "unknown format", chat(response_format={"type": "xml"}), "invalid_value", "response_format.type"),
    (30, "schema of 1 MB", chat(json_schema={"enum": ["x" * 2**20]}), "invalid_value", "json_schema"),
    (30, "schema 1,000 deep", b'{"json_schema":' + b'{"not":' * 1000 + b"{}" + b"}" * 1001, "invalid_json", None),
    (30, "schema 1,000 deep as text", chat(guided_json='{"not":' * 1000 + "{}" + "}" * 1000), "invalid_value",
     "guided_json"),
    (31, "$ref in a circle", chat(json_schema={"$ref": "#"}), "invalid_value", "json_schema.$ref"),
    (31, "remote $ref", chat(json_schema={"$ref": "http://169.254.169.254/"}), "invalid_value", "json_schema.$ref"),
    (32, "keyword that is not enforced", chat(json_schema={"type": "string", "format": "regex"}), "invalid_value",
     "json_schema.format"),
    (33, "schema false", chat(response_format={"type": "json_schema", "json_schema": {"schema": False}}),
     "invalid_value", "response_format.json_schema.schema"),
    (33, "bounds that contradict", chat(json_schema={"type": "integer", "minimum": 3, "maximum": 2}), "invalid_value",
     "json_schema"),
    (34, "foo**", chat(guided_regex="foo**"), "invalid_value", "guided_regex"),
    (34, "back-reference", chat(guided_regex=r"(a)\1"), "invalid_value", "guided_regex"),
    (34, "10^6 repeats", chat(guided_regex="a{1000000}"), "invalid_value", "guided_regex"),
    (35, "left recursion", chat(grammar='root ::= root "a" | "a"'), "invalid_value", "grammar"),
    (35, "empty rule", chat(grammar="root ::= a\na ::= "), "invalid_value", "grammar"),
    (35, "10 MB of grammar", chat(grammar='root ::= "' + "a" * 10_000_000 + '"'), "invalid_value", "grammar"),
    (54, "request id with a line break", chat(request_id="a\nb"), "invalid_value", "request_id"),
    (0, "stream options without a stream", chat(stream_options={"include_usage": True}), "invalid_value",
     "stream_options"),
    (0, "both continuations", chat(add_generation_prompt=True, continue_final_message=True), "invalid_value",
     "continue_final_message"),
    (0, "only stop tokens", chat(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1), "invalid_value",
     "min_tokens"),
    (0, "salt too long", chat(cache_salt="x" * 1000), "invalid_value", "cache_salt"),
    (0, "priority too large", chat(priority=2**40), "invalid_value", "priority"),
    (0, "priority under first-come", chat(priority=1), "invalid_value", "priority"),
    (0, "a tier", chat(service_tier="priority"), "unsupported_parameter", "service_tier"),
    (0, "a price below the prompt", chat(max_cost=1), "invalid_value", "max_cost"),
    (0, "a year of cache", chat(prompt_cache_retention="1y"), "invalid_value", "prompt_cache_retention"),
    (0, "a ttl of a year", chat(cache_control={"type": "ephemeral", "ttl": "1y"}), "invalid_value",
     "cache_control.ttl"),
    (0, "a long session", chat(session_id="x" * 1000), "invalid_value", "session_id"),
]  # fmt: skip

COMPLETION_BODIES: list[tuple[int, str, bytes, str, str | None]] = [
    (11, "best_of", complete(best_of=10**6), "invalid_value", "best_of"),
    (12, "logprobs 10^6", complete(logprobs=10**6), "invalid_value", "logprobs"),
    (12, "logprobs true", complete(logprobs=True), "invalid_type", "logprobs"),
    (0, "suffix", complete(suffix="end"), "invalid_value", "suffix"),
    (20, "empty prompt", complete(prompt=""), "invalid_value", "prompt"),
    (20, "empty list", complete(prompt=[]), "invalid_value", "prompt"),
    (20, "list of an empty list", complete(prompt=[[]]), "invalid_value", "prompt"),
    (20, "list of an empty text", complete(prompt=["a", ""]), "invalid_value", "prompt"),
    (20, "null prompt", complete(prompt=None), "invalid_type", "prompt"),
    (20, "mixed list", complete(prompt=["a", 3]), "invalid_value", "prompt"),
    (20, "prompt missing", b"{}", "invalid_type", "prompt"),
    (24, "1M ids", complete(prompt=[5] * 10**6), "context_length_exceeded", "prompt"),
    (24, "10 MB of text", complete(prompt="word " * 2_000_000), "context_length_exceeded", "prompt"),
    (
        24,
        "a text of the window",
        complete(prompt="x" * WINDOW, max_tokens=1),
        "context_length_exceeded",
        "prompt",
    ),
    (
        24,
        "a text and too long an answer",
        complete(prompt="x" * (WINDOW - 1)),
        "context_length_exceeded",
        "max_tokens",
    ),
    (26, "negative id", complete(prompt=[5, -1]), "invalid_value", "prompt"),
    (26, "id of no token", complete(prompt=[VOCAB]), "invalid_value", "prompt"),
    (26, "id 2^31", complete(prompt=[2**31]), "invalid_value", "prompt"),
    (26, "id 2^70", complete(prompt=[2**70]), "", "prompt"),
    (26, "id as fraction", complete(prompt=[1.5]), "invalid_type", "prompt[0]"),
    (26, "id as truth", complete(prompt=[True]), "invalid_type", "prompt[0]"),
    (26, "stop id of no token", complete(stop_token_ids=[VOCAB]), "invalid_value", "stop_token_ids"),
    (27, "one over the window", complete(prompt=[5] * (WINDOW - 1)), "context_length_exceeded", "max_tokens"),
    (
        27,
        "the whole window",
        complete(prompt=[5] * WINDOW, max_tokens=1),
        "context_length_exceeded",
        "prompt",
    ),
    (11, "too many prompts", complete(prompt=["a"] * 2000), "invalid_value", "prompt"),
]


@pytest.mark.parametrize(
    ("body", "code", "param"), [c[2:] for c in CHAT_BODIES], ids=[f"{c[0]}: {c[1]}" for c in CHAT_BODIES]
)
def test_chat(server: LiveServer, body: bytes, code: str, param: str | None) -> None:
    message = server.post("/v1/chat/completions", body).error(400, code or None, param)
    if param is not None:
        assert param.partition("[")[0] in message


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [c[2:] for c in COMPLETION_BODIES],
    ids=[f"{c[0]}: {c[1]}" for c in COMPLETION_BODIES],
)
def test_completions(server: LiveServer, body: bytes, code: str, param: str | None) -> None:
    server.post("/v1/completions", body).error(400, code or None, param)


def test_lists_are_bounded(server: LiveServer) -> None:
    """Lists that are too long are refused by their length, whatever they contain."""
    server.post("/v1/completions", complete(prompt=[5] * (2**20 + 1))).error(400, "invalid_json")
    server.post("/v1/completions", complete(bad_words=["a"] * 2**18)).error(400, "invalid_json")
    server.post("/v1/chat/completions", chat(messages=[[]] * 2**18)).error(400, "invalid_json")
    server.post("/detokenize", json.dumps({"tokens": [5] * 300}).encode()).error(
        400, "invalid_value", "tokens"
    )
    for name, value in (
        ("stop_token_ids", [1] * 4097), ("banned_token_ids", [1] * 4097), ("messages", MESSAGES * 17_000),
        ("chat_template_kwargs", {str(i): i for i in range(300)}), ("stop", ["a"] * 65), ("cache_salt", "a" * 257),
    ):  # fmt: skip
        message = server.post("/v1/chat/completions", chat(**{name: value})).error(400, "invalid_value", name)
        assert "of length <= " in message
    for allowed in ([5] * 2**19, list(range(VOCAB)) * 3, [VOCAB]):
        reply = server.post("/v1/chat/completions", chat(allowed_token_ids=allowed))
        reply.error(400, "invalid_value", "allowed_token_ids")
    assert server.post("/v1/chat/completions", chat(allowed_token_ids=list(range(VOCAB)))).status == 200
    many = {"logprobs": True, "top_logprobs": 20, "max_tokens": 150}
    assert server.chat(n=2, **many).status == 200
    with_limit = server.complete(["a"] * 64, logprobs=64, n=16, max_tokens=100).error(
        400, "invalid_value", "logprobs"
    )
    assert str(2**20) in with_limit
    several = server.complete(["a"] * 64, prompt_logprobs=64, n=17).error(400, "invalid_value", "n")
    assert "64 prompts with 17 samples each are 1088 choices, over the limit of 1024" in several


def test_prompt_logprobs_are_bounded(server: LiveServer) -> None:
    """The size of one response is bounded, whatever the window."""
    params, body = SamplingParams(prompt_logprobs=60), CompletionRequest(prompt="x")
    scope = {"method": "POST", "path": "/", "headers": []}
    exchange, context = Exchange(scope, None, None, plenty()), SimpleNamespace(hooks=None)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match=f"prompt_logprobs: {6999 * 61} entries"):
        make_ask(context, exchange, body, params, TokenIds([5] * 7000), "name")  # type: ignore[arg-type]
    together = server.complete([[5] * 190] * 100, prompt_logprobs=64, max_tokens=1)
    assert str(18_900 * 65) in together.error(400, "invalid_value", "prompt_logprobs")
    answer = server.complete([5] * 150, prompt_logprobs=64, max_tokens=1).json["choices"][0]
    assert len(answer["prompt_logprobs"]) == 150
    check_logprobs(
        SamplingParams(prompt_logprobs=64, prompt_logprobs_start=180), [190] * 100, 200, "logprobs"
    )


def test_edge_values_work(server: LiveServer) -> None:
    """Seeds, odd texts and lengths at their limits, and harmless values of unsupported fields."""
    for seed in (-(2**63), 2**64 - 1, 0):
        assert server.chat(seed=seed, max_tokens=1).status == 200
    for text in ("\u0000", "\uffff", "\ufeffhi", "e\u0301", "\U0001f600"):
        reply = server.post("/v1/chat/completions/render", {"messages": [{"role": "user", "content": text}]})
        assert reply.status == 200
        assert text in reply.json["prompt"]
    assert server.complete([5] * (WINDOW - 1), max_tokens=1).status == 200
    harmless = {
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "best_of": 1, "user": "me",
        "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "suffix": None, "unheard_of": 1,
        "temperature": None, "max_tokens": 1, "top_k": -1, "logprobs": None, "stop": None, "seed": None,
    }  # fmt: skip
    assert server.chat(**harmless).status == 200


def test_stop_equal_to_the_first_token_and_overlapping_stops(server: LiveServer) -> None:
    """A stop string that equals the first token, and stop strings that overlap."""
    fixed: dict[str, Any] = {"temperature": 1.5, "max_tokens": 10, "ignore_eos": True}
    seed, text = next(
        (seed, text)
        for seed in range(100)
        if len(set(text := server.complete("go", seed=seed, **fixed).json["choices"][0]["text"])) == 10
    )
    fixed["seed"] = seed
    first = server.complete("go", stop=text[0], **fixed).json["choices"][0]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("", "stop", text[0])
    both = server.complete("go", stop=[text[3:6], text[2:5]], **fixed).json["choices"][0]
    assert (both["text"], both["stop_reason"]) == (text[:2], text[2:5])


def test_unknown_models_never_touch_disk_or_network(server: LiveServer) -> None:
    """The name of a model in a request is only compared."""
    for name in ("gpt-4", "/etc/passwd", "../../x", "http://example.com/model", "", "x" * 100_000):
        server.chat(model=name).error(404, "model_not_found", "model")


def test_bodies_that_are_not_plain_json(server: LiveServer) -> None:
    """Compressed bodies, and other content types."""
    body, path = chat(), "/v1/chat/completions"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        server.post(path, body, {"content-type": kind}).error(415, "unsupported_media_type")
    assert server.post(path, body, {"content-type": "application/json; charset=utf-8"}).status == 200
    bomb = gzip.compress(b" " * 2**24)
    server.post(path, bomb, {"content-encoding": "gzip"}).error(415, "unsupported_content_encoding")


def test_a_client_that_sends_everything_first_reads_the_refusal(server: LiveServer) -> None:
    """Closing with input unread would reset the connection before its client looks."""
    too_long = b" " * 40 * 2**20
    for headers in ("", "connection: close\r\n"):
        with server.connect() as sock:
            sock.sendall(request_bytes("/detokenize", too_long, headers=headers))
            assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_bodies_over_the_limit(server: LiveServer) -> None:
    """Bodies over the limit: declared, and chunked without an end."""
    with server.connect() as sock:
        head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {2**40}\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
    with server.connect() as sock:
        sock.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        try:
            for _ in range(1000):
                sock.sendall(piece)
            pytest.fail("an endless body was read")
        except ConnectionError:
            pass
    server.counted(2, "http_requests_total", handler="/tokenize", status="413")


def test_times_that_have_passed(server: LiveServer) -> None:
    """Requests whose deadline has passed: nothing is computed."""
    server.wait(lambda: server.engine.state == "ready")
    for fields in ({"deadline_ms": 0}, {"deadline_ms": -5}, {"max_queue_ms": -1}, {"deadline_ms": 0.0001}):
        server.chat(max_tokens=5, **fields).error(504, "deadline_exceeded")
    # a deadline within the answer ends it; a server that has others to answer and foresees it refuses at once
    reply = server.chat(ignore_eos=True, deadline_ms=20, n=64)
    if reply.status == 429:
        message = reply.error(429, "would_be_late")
        assert int(re.search(r"deadline_ms (\d+) or more", message).group(1)) >= 20  # type: ignore[union-attr]
    else:
        assert reply.status in {200, 504}
    server.chat("x", deadline_ms=60_000, max_queue_ms=60_000, max_tokens=1)


def test_fields_of_other_servers_with_another_place_or_name(server: LiveServer) -> None:
    server.get("/nothing/here").error(404, "not_found")
    server.get("/v1/../metrics").error(404, "not_found")
    wrong = server.get("/v1/completions")
    wrong.error(405, "method_not_allowed")
    assert wrong.headers["allow"] == "OPTIONS, POST"
    server.request("DELETE", "/v1/models").error(405)
    server.request("POST", "/health", {}).error(405)


def test_large_prompts_leave_the_event_loop_free(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health answers while a large body is parsed or a text is tokenized, however long it takes."""
    assert sys.getswitchinterval() < 0.001
    begun, answered = threading.Event(), threading.Event()

    def slow(work: Callable[..., Any], place: int, size: int) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            if len(args[place]) > size:
                begun.set()
                assert answered.wait(GUARD)
            return work(*args, **options)

        return wait

    monkeypatch.setattr(json_input, "decode", slow(json_input.decode, 0, 10**5))
    monkeypatch.setattr(Tokenizer, "encode", slow(Tokenizer.encode, 1, 100))
    for prompt in ("word " * 2_000_000, [5] * 10**6, "a" * 2**20, "a" * 150):
        thread = threading.Thread(target=server.post, args=("/v1/completions", complete(prompt=prompt)))
        thread.start()
        assert begun.wait(GUARD)
        for _ in range(3):
            assert server.get("/health/live").status == 200
            assert not answered.is_set()
        answered.set()
        thread.join()
        begun.clear()
        answered.clear()


def test_unknown_fields_can_be_refused(folder: Path) -> None:
    """With unknown_fields="refuse", unknown fields are refused and known ones still pass."""
    with serving(folder, unknown_fields="refuse") as strict:
        strict.chat(max_tokens=1, unheard_of=1).error(400, "unknown_field", "unheard_of")
        assert strict.chat(max_tokens=1, user="me", top_k=3).status == 200
        strict.post("/tokenize", {"prompt": "a", "extra": 1}).error(400, "unknown_field", "extra")


# Fields of OpenAI's two routes and vLLM's additions to them, whether supported or not.
SHARED_FIELDS = """
    model stream stream_options temperature top_p n stop seed presence_penalty frequency_penalty logit_bias
    max_tokens user top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words structured_outputs priority request_id session_id cache_salt
    return_token_ids response_format logprobs return_tokens_as_token_ids kv_transfer_params use_beam_search
    add_special_tokens echo deadline_ms max_queue_ms best_of thinking_token_budget
"""
CHAT_FIELDS = """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls metadata store
    reasoning_effort verbosity service_tier prediction modalities prompt_cache_key prompt_cache_retention
    prompt_cache_options safety_identifier cache_control max_cost add_generation_prompt
    continue_final_message documents chat_template
    chat_template_kwargs include_reasoning function_call functions audio web_search_options
"""


def test_every_field_that_others_have_is_known(folder: Path) -> None:
    """A field of another server is applied, ignored because it changes nothing, or refused by name; never unknown."""
    with serving(folder, unknown_fields="refuse") as strict:
        routes = {
            "/v1/chat/completions": [*SHARED_FIELDS.split(), *CHAT_FIELDS.split()],
            "/v1/completions": [*SHARED_FIELDS.split(), "prompt", "suffix"],
        }
        for path, names in routes.items():
            for name in names:
                body = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
                reply = strict.post(path, {**body, "max_tokens": 1, name: {"made": "up"}})
                assert reply.status in {200, 400}, (path, name)
                if reply.status == 400:
                    assert reply.json["error"]["code"] != "unknown_field", (path, name)


def test_parameters_with_other_names_elsewhere_are_not_dropped(server: LiveServer) -> None:
    for name, value in (
        ("n_predict", 3),
        ("watermark", True),
        ("repeat_penalty", 1.1),
        ("options", {"num_predict": 3}),
        ("system", "Be brief."),
        ("template", "{{ .Prompt }}"),
        ("think", True),
        ("raw", True),
        ("store", True),
        ("cache_prompt", False),
        ("timings_per_token", True),
        ("moderation", {"model": "m"}),
    ):
        server.chat(max_tokens=1, **{name: value}).error(400, "unsupported_parameter", name)
    harmless = {"typical_p": 1, "repeat_penalty": 1.0, "cache_prompt": True, "service_tier": "auto", "priority": 0,
                "cache_control": {"type": "ephemeral"}, "raw": False, "store": False, "id_slot": -1,
                "options": {}}  # fmt: skip
    assert server.chat(max_tokens=1, **harmless).status == 200


def test_a_length_that_was_not_asked_for_ends_with_the_window(server: LiveServer) -> None:
    for prompt, tokens in (
        ("x" * (WINDOW - 5), 5),
        ([5] * (WINDOW - 16), 16),
        (["x", "x" * (WINDOW - 3)], 16 + 3),
    ):
        reply = server.complete(prompt, ignore_eos=True)
        assert reply.status == 200, reply.text
        assert reply.json["usage"]["completion_tokens"] == tokens
