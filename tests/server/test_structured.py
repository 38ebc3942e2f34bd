"""Structured output over HTTP: every field that asks for it, whole and streamed, and every way to refuse it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import LiveServer, Neighbour, request_bytes, serving, stream_text
from quire.engine.api import CompiledStructure
from quire.engine.front.grammars import GrammarService
from quire.parameters import Structure

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}
GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'
LARK = 'start: "yes" | "no" DIGIT\nDIGIT: /[0-9]/'
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</t>"},
}  # fmt: skip


def fits(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"a", "b"} and found["a"] in {"x", "yy"} and isinstance(found["b"], bool)


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def chosen(text: str) -> bool:
    return text in {"red", "green"}


def worded(text: str) -> bool:
    return re.fullmatch("yes|no[0-9]", text) is not None


def tagged(text: str) -> bool:
    return text.startswith("<t>") and text.endswith("</t>") and fits(text[3:-4])


def matched(text: str) -> bool:
    return re.fullmatch("[a-c]{3}", text) is not None


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "OpenAI, schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        fits,
    ),
    "OpenAI, object": ({"response_format": {"type": "json_object"}}, is_object),
    "llama-server, object of a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, fits),
    "vLLM, tag": ({"response_format": TAG}, tagged),
    "vLLM, json": ({"structured_outputs": {"json": SCHEMA, **COMPACT}}, fits),
    "vLLM, json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, fits),
    "vLLM, regex": ({"structured_outputs": {"regex": "[a-c]{3}"}}, matched),
    "vLLM, choice": ({"structured_outputs": {"choice": ["red", "green"]}}, chosen),
    "vLLM, GBNF": ({"structured_outputs": {"grammar": GBNF}}, worded),
    "vLLM, Lark": ({"structured_outputs": {"grammar": LARK}}, worded),
    "vLLM, object": ({"structured_outputs": {"json_object": True}}, is_object),
    "vLLM, tag as text": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, tagged),
    "guided, json": ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, fits),
    "guided, whitespace": ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, fits),
    "guided, regex": ({"guided_regex": "[a-c]{3}"}, matched),
    "guided, choice": ({"guided_choice": ["red", "green"]}, chosen),
    "guided, grammar": ({"guided_grammar": LARK}, worded),
    "llama-server, grammar": ({"grammar": GBNF}, worded),
    "llama-server, schema": ({"json_schema": SCHEMA}, fits),
    "Ollama, json": ({"format": "json"}, is_object),
    "Ollama, schema": ({"format": SCHEMA}, fits),
}  # fmt: skip
NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}, {"format": ""},
    {"grammar": ""}, {"guided_json": None}, {"json_schema": None}, {"structured_outputs": {"json_object": False}},
    {"response_format": {"type": "text"}, "grammar": None},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_field_is_enforced_whole_and_streamed(server: LiveServer, form: str) -> None:
    asked, fits = FORMS[form]
    for seed in range(2):
        fields = {**asked, "seed": seed, "max_tokens": 150}
        choice = server.chat(**fields).json["choices"][0]
        text = choice["message"]["content"]
        streamed = server.chat(**fields, stream=True)
        assert stream_text(streamed)[0] == text
        assert server.complete(**fields).status == 200
        if choice["finish_reason"] == "stop":
            assert fits(text), text
        else:  # random weights may fill a string to the end
            assert (
                form in {"OpenAI, object", "vLLM, object", "Ollama, json"} or "\n" in text or " " in text
            ), text
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("asked", NOTHING, ids=str)
def test_fields_that_ask_for_nothing(server: LiveServer, asked: dict[str, Any]) -> None:
    plain = server.chat(seed=4, max_tokens=8).json["choices"][0]["message"]["content"]
    assert server.chat(seed=4, max_tokens=8, **asked).json["choices"][0]["message"]["content"] == plain


def test_several_samples_and_prompts(server: LiveServer) -> None:
    choices = server.complete(["a", "b"], n=3, guided_regex="[a-c]{3}", max_tokens=20).json["choices"]
    assert len(choices) == 6
    assert all(matched(choice["text"]) for choice in choices)
    assert len({choice["text"] for choice in choices}) > 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
    ({"response_format": {"type": "json_object"}, "format": "json"}, "format", "response_format and format"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.regex",
     "structured_outputs.json_object and structured_outputs.regex"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema", "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}},
     "response_format.json_schema.schema.type", "expected"),
    ({"guided_json": {"properties": {"a": {"minimum": "b"}}}}, "guided_json.properties.a.minimum", ""),
    ({"json_schema": {"$ref": "https://example.com/"}}, "json_schema.$ref", ""),
    ({"guided_json": "{"}, "guided_json", ""),
    ({"guided_regex": "(a"}, "guided_regex", ""),
    ({"guided_regex": "\\"}, "guided_regex", ""),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]", ""),
    ({"guided_grammar": "start: other"}, "guided_grammar", ""),
    ({"grammar": "root ::= other"}, "grammar", ""),
    ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structured_outputs.structural_tag", ""),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "additionalProperties"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "json"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "regex"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", ""),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ""),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_decoding_backend": "outlines", "guided_regex": "a"}, "guided_decoding_backend", "guidance"),
    ({"format": "xml"}, "format", "json"),
    ({"grammar": "root ::= x", "grammar_lazy": True}, "grammar_lazy", "first token"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_the_field(server: LiveServer, asked: dict[str, Any], param: str, said: str) -> None:
    for stream in (False, True):
        message = server.chat(stream=stream, **asked).error(400, param=param or None)
        assert said in message
        assert (param or next(iter(asked))) in message
    assert server.idle()


def test_two_fields_at_once_name_both(server: LiveServer) -> None:
    message = server.complete(guided_choice=["a"], json_schema=SCHEMA).error(
        400, "invalid_value", "json_schema"
    )
    assert message.startswith("guided_choice and json_schema both say")


def test_what_strict_false_dropped_is_in_the_answer(server: LiveServer) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "a": {"enum": ["x"], "format": "made-up"}}}
    named = {"name": "s", "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    message = server.chat(response_format=form).error(400)
    assert "made-up" in message
    for strict in (None, True):
        server.chat(response_format={**form, "json_schema": {**named, "strict": strict}}).error(400)
    lenient = {"response_format": {**form, "json_schema": {**named, "strict": False}}, "max_tokens": 60}
    whole = server.chat(**lenient).json
    (said,) = whole["dropped_keywords"]
    assert said.startswith("/properties/a/format")
    events = server.chat(stream=True, **lenient).events
    assert events[-1] == "[DONE]"
    assert events[-2]["dropped_keywords"] == whole["dropped_keywords"]
    assert events[-2]["choices"] == []
    assert server.complete(**lenient).json["dropped_keywords"] == whole["dropped_keywords"]
    assert "dropped_keywords" not in server.chat(json_schema=SCHEMA, max_tokens=40).json


def test_an_answer_cut_by_its_length_is_marked(server: LiveServer) -> None:
    reply = server.chat(guided_regex="[a-c]{30}", max_tokens=7).json["choices"][0]
    assert reply["finish_reason"] == "length"
    assert re.fullmatch("[a-c]{7}", reply["message"]["content"])


class Slow:
    """Stands in for compiling: waits until it is let go, or cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.cancelled, self.free = 0, 0, threading.Event()
        real = GrammarService.compile

        async def compile_slowly(service: GrammarService, asked: Structure, tenant: str) -> CompiledStructure:
            import asyncio

            self.began += 1
            try:
                while not self.free.is_set():
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return await real(service, asked, tenant)

        monkeypatch.setattr(GrammarService, "compile", compile_slowly)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.free.set()


def test_a_request_that_compiles_holds_up_no_other(server: LiveServer, slow: Slow) -> None:
    replies: list[Any] = []
    asking = threading.Thread(
        target=lambda: replies.append(server.chat(guided_regex="[a-c]{3}", max_tokens=9))
    )
    asking.start()
    server.wait(lambda: slow.began == 1)
    assert server.idle()  # nothing is queued before the grammar is known to be good
    assert server.http.context.memory.work.used == 0
    assert server.chat(max_tokens=3).status == 200
    slow.free.set()
    asking.join()
    assert matched(replies[0].json["choices"][0]["message"]["content"])


def test_deadlines_pass_while_a_grammar_is_compiled(server: LiveServer, slow: Slow) -> None:
    for name in ("deadline_ms", "max_queue_ms"):
        server.chat(guided_regex="a", **{name: 30}).error(504, "deadline_exceeded")
    server.wait(lambda: slow.cancelled == 2)


def test_a_client_that_leaves_while_its_grammar_is_compiled(server: LiveServer, slow: Slow) -> None:
    body = {"prompt": "a", "guided_regex": "a"}
    with server.connect() as sock:
        sock.sendall(request_bytes("/v1/completions", body))
        server.wait(lambda: slow.began == 1)
    server.wait(lambda: slow.cancelled == 1)
    server.wait(server.idle)
    memory = server.http.context.memory
    server.wait(lambda: not memory.bodies.used + memory.work.used + memory.answers.used)


def test_metrics_count_kinds_refusals_and_the_cache(folder: Path) -> None:
    with serving(folder, reasoning_parser="qwen3") as live:
        reply = live.chat(thinking_token_budget=3, max_tokens=3)  # for which nothing is compiled
        assert reply.status == 200, reply.text
        for _ in range(3):
            assert live.chat(guided_regex="[a-c]{4}", max_tokens=6).status == 200
        live.chat(guided_regex="(").error(400)
        live.counted(3, "quire_structured_requests_total", kind="regex")
        live.counted(1, "quire_structured_refused_total", kind="regex")
        live.counted(2, "quire_grammar_cache_hits_total")
        live.counted(1, "quire_grammar_compile_seconds_count")


HOSTILE: dict[str, dict[str, Any]] = {
    "regex of exponential states": {"guided_regex": "(a|a)*" * 40 + "b"},
    "huge repetition": {"guided_regex": "((a{1000}){1000}){1000}"},
    "bad escape": {"json_schema": {"type": "string", "pattern": "\\q[\\"}},
    "no type": {"json_schema": {"properties": {"a": {}}}},
    "huge maxItems": {"json_schema": {"type": "array", "maxItems": 10**12, "minItems": 10**9}},
    "huge maxLength": {"json_schema": {"type": "string", "maxLength": 10**12, "minLength": 10**9}},
    "recursive $ref": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "remote $ref": {"json_schema": {"$ref": "http://169.254.169.254/x"}},
    "many options": {"json_schema": {"anyOf": [{"allOf": [{"enum": [i]}, {"type": "integer"}]} for i in range(900)]}},
    "wide object": {"json_schema": {"properties": {f"k{i}": {"type": "string"} for i in range(5000)}}},
    "grammar in a circle": {"grammar": "root ::= root"},
    "long choice": {"guided_choice": [f"{i}" * 40 for i in range(9000)]},
    "tag": {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {}}}},
}  # fmt: skip


def check_hostile(server: LiveServer, names: Iterable[str]) -> None:
    """Each is answered, refused or cut by its length; the neighbour's text does not change by a bit."""
    neighbour = Neighbour(server)
    try:
        for name in names:
            reply = server.chat(max_tokens=20, **HOSTILE[name])
            assert reply.status in {200, 400}, (name, reply.text)
            assert reply.status == 200 or reply.json["error"]["message"]
        assert server.chat(guided_choice=["red"], max_tokens=9).status == 200
    finally:
        neighbour.stop()
    assert neighbour.rounds > 0
    assert neighbour.differences == []


def test_hostile_structures_leave_the_neighbour_alone(server: LiveServer) -> None:
    check_hostile(server, ("huge repetition", "bad escape", "recursive $ref", "remote $ref", "huge maxItems"))


@pytest.mark.fuzz
def test_all_hostile_structures_leave_the_neighbour_alone(server: LiveServer) -> None:
    check_hostile(server, HOSTILE)
