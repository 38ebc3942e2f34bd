"""Every format of calls and of reasoning through one server: what a client gets, whole and streamed.

`make test` takes the formats that differ most from each other, `make test-regions` all of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers.region_cases import CASES, IDS, TOOLS, Case
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, serving
from helpers.tool_chats import CITY, FLAG, fits, folded, without_ids
from quire.text.reading import AnswerFormat
from quire.text.regions.families import CALLS, REASONING
from quire.text.regions.spec import CallIds

FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]
CALL_NAMES = sorted({spec.name for spec in CALLS.values()})
# Formats of calls with the reasoning that their families write.
PAIRS = {case.calls: case.reasoning or "qwen3" for case in CASES}
REASONING_NAMES = sorted({spec.name for spec in REASONING.values()})
# Arguments in JSON, tags and Python; openers that are tokens, spelled, and none; every origin of ids; channels;
# thinking that a token, a text, a channel or the opener of calls ends.
SAMPLE = {"glm45-3", "llama3_json-4", "mistral_v11-10", "kimi_k2-13", "openai-14", "granite-15"}
SAMPLE_REQUIRED = {"qwen3_coder", "gemma3"}


def sampled(names: list[str], sample: set[str]) -> list[Any]:
    """Parameters of a test, of which `make test` takes some."""
    assert sample <= set(names)
    return [pytest.param(name, marks=() if name in sample else pytest.mark.regions) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_folder(tmp_path_factory.mktemp("formats") / "model")


@pytest.fixture(scope="module")
def script(folder: Path) -> Script:
    return Script(folder)


@pytest.fixture(scope="module")
def server(folder: Path, script: Script) -> Iterator[LiveServer]:
    with script.played(), serving(folder, {"max_model_len": 2048}) as live:
        yield live


@contextlib.contextmanager
def reading(server: LiveServer, calls: str, reasoning: str) -> Iterator[None]:
    """The server as with --tool-call-parser and --reasoning-parser: one start serves every format."""
    text = server.engine._text
    assert text is not None
    assert text.tokenizer is not None
    named = AnswerFormat(text.tokenizer, tool_call_parser=calls, reasoning_parser=reasoning)
    with mock.patch.object(text, "_format", named):
        yield


def whole_and_streamed(server: LiveServer, text: str, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """The choices and the usage of a chat, whose stream adds up to the same."""
    reply = server.chat(text, **fields)
    assert reply.status == 200, reply.text
    streamed = server.chat(text, stream=True, stream_options={"include_usage": True}, **fields)
    assert without_ids(folded(streamed)) == without_ids(reply.json["choices"])
    usage = reply.json["usage"]
    details = "completion_tokens", "completion_tokens_details"
    assert [streamed.events[-2]["usage"][name] for name in details] == [usage[name] for name in details]
    return reply.json["choices"], usage


def check_ids(case: Case, ids: list[str]) -> None:
    """Ids are those that the format wants, and each call has its own."""
    shape = {CallIds.NINE: 9, CallIds.INDEXED: len("functions.f:0")}.get(case.spec.calls.ids)  # type: ignore[union-attr]
    assert len(set(ids)) == len(ids)
    assert shape is None or {len(number) for number in ids} == {shape}


def expected(case: Case) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning and calls of an answer."""
    said = {kind: "".join(text for one, text in case.parts if one == kind) for kind in ("text", "reasoning")}
    names = [text for kind, text in case.parts if kind == "call"]
    arguments = [text for kind, text in case.parts if kind == "arguments"]
    return said["text"], said["reasoning"], list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", sampled(IDS, SAMPLE))
def test_calls_of_every_format(server: LiveServer, script: Script, name: str) -> None:
    case = CASES[IDS.index(name)]
    script.says(name, case.text)
    with reading(server, case.calls, case.reasoning or "qwen3"):
        (choice,), usage = whole_and_streamed(server, name, tools=FUNCTIONS)
    text, reasoning, calls = expected(case)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"] or "").strip() == text
    assert message.get("reasoning", "") == message.get("reasoning_content", "") == reasoning
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == calls
    check_ids(case, [call["id"] for call in message["tool_calls"]])
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert thought > len(reasoning) if reasoning else thought == 0


@pytest.mark.parametrize("name", sampled(CALL_NAMES, SAMPLE_REQUIRED))
def test_calls_that_are_required_in_every_format(server: LiveServer, name: str) -> None:
    """Random weights write nothing but thinking, kept short, and calls that fit, in the format that is read."""
    fields = {"tools": [CITY, FLAG], "tool_choice": "required", "thinking_token_budget": 5}
    fields |= {"temperature": 1.5, "seed": 7, "n": 2}
    with reading(server, name, PAIRS[name]):
        choices, _ = whole_and_streamed(server, "anything", max_tokens=300, **fields)
        one, _ = whole_and_streamed(server, "anything", max_tokens=300, parallel_tool_calls=False, **fields)
    for choice in choices:
        calls = choice["message"]["tool_calls"]
        # many calls in a row: the last one may be cut off
        assert all(map(fits, calls[:-1] if choice["finish_reason"] == "length" else calls))
    for choice in one:
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
        (call,) = choice["message"]["tool_calls"]
        assert fits(call)


ANSWERS = {"openai_gptoss": "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"}


@pytest.mark.parametrize("name", sampled(REASONING_NAMES, {"granite", "openai_gptoss"}))
def test_reasoning_of_every_format(server: LiveServer, script: Script, name: str) -> None:
    spec = REASONING[name]
    script.says(f"thinks as {name}", f"{spec.opener}Is it 4?{spec.closer}{ANSWERS.get(name, 'It is 4.')}")
    with reading(server, "hermes", name):
        (choice,), usage = whole_and_streamed(server, f"thinks as {name}")
        (short,), _ = whole_and_streamed(server, f"thinks as {name}", include_reasoning=False)
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == (
        "It is 4.", "Is it 4?", "stop",
    )  # fmt: skip
    assert usage["completion_tokens_details"]["reasoning_tokens"] > len("Is it 4?")
    assert short["message"] == {"content": "It is 4.", "role": "assistant", "refusal": None}


def test_a_call_of_another_format_is_text(server: LiveServer, script: Script) -> None:
    """Negative control: what the server reads is what it was started with."""
    case = CASES[IDS.index("mistral_v11-10")]
    script.says("of another", case.text)
    with reading(server, "hermes", "qwen3"):
        (choice,), _ = whole_and_streamed(server, "of another", tools=FUNCTIONS)
    assert "tool_calls" not in choice["message"]
    assert json.dumps(case.parts[2][1])[1:-1] in json.dumps(choice["message"]["content"])
