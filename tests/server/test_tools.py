"""Tool calls and reasoning over HTTP: every field, every shape; streamed and whole answers are the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, serving
from helpers.tool_chats import CITY, FLAG, ON, fits, fold, folded, without_ids
from quire.answers import AnswerPart, PartKind
from quire.engine.api import GenerateAsk, StreamDelta
from quire.engine.front.output import OutputBuilder
from quire.server.assistant import ChatEvents, MessageForm, choice_pieces
from quire.server.chunks import Chunks, Envelope
from quire.server.draft_marks import DraftMarks
from quire.server.generation import Answer, ChoiceStream
from quire.server.logprob_bodies import TokenTexts
from quire.text.reading import AnswerFormat
from quire.text.tokenizer import Tokenizer
from quire.types import FinishReason, Request, SamplingParams, SeqEvent, TokenIds

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
TOOLS = [WEATHER, ADD]
PARIS = '{"city": "Paris, \\"Île\\""}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    made = Script(scripted_folder(tmp_path_factory.mktemp("scripted") / "model"))
    made.says("one call", "Let me look.\n" + ONE)
    made.says("two calls", TWO)
    made.says("thinks", "<think>\nIs it 4?\n</think>\n\nIt is 4.")
    made.says("ponders", "<think>\nThe weather.\n</think>\n\n" + ONE)
    made.says("broken", "See:\n<tool_call>\nno call\n</tool_call> done")
    made.says("plain", "Just text.")
    made.says("stranger", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>')
    made.says("differ", "First.", ONE, "<think>\nhm\n</think>\n\nThird.")
    made.says("stops", "One. Two. Three." + ONE)
    return made


@pytest.fixture(scope="module")
def server(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = next(tmp_path_factory.getbasetemp().glob("scripted*/model"))
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with script.played(), serving(folder, {"max_model_len": 2048}, **options) as live:
        yield live


def whole(server: LiveServer, text: str, **fields: Any) -> list[dict[str, Any]]:
    reply = server.chat(text, **fields)
    assert reply.status == 200, reply.text
    return list(reply.json["choices"])


SAID: dict[str, tuple[str | None, str | None, list[tuple[str, str]], str]] = {
    "one call": ("Let me look.", None, [("get_weather", PARIS)], "tool_calls"),
    "two calls": (None, None, [("get_weather", PARIS), ("add", '{"a": 1}')], "tool_calls"),
    "thinks": ("It is 4.", "Is it 4?", [], "stop"),
    "ponders": (None, "The weather.", [("get_weather", PARIS)], "tool_calls"),
    "plain": ("Just text.", None, [], "stop"),
}


@pytest.mark.parametrize("key", SAID)
def test_whole_and_streamed(server: LiveServer, key: str) -> None:
    content, reasoning, calls, reason = SAID[key]
    (choice,) = whole(server, key, tools=TOOLS)
    message = choice["message"]
    assert choice["finish_reason"] == reason
    assert message["role"] == "assistant"
    assert (message["content"] and message["content"].strip()) == content
    assert message.get("reasoning_content") == message.get("reasoning")
    assert (message.get("reasoning") and message["reasoning"].strip()) == reasoning
    found = message.get("tool_calls", [])
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert len({call["id"] for call in found}) == len(found)
    assert all(call["id"].startswith("call_") for call in found)
    streamed = server.chat(key, tools=TOOLS, stream=True)
    assert without_ids(folded(streamed)) == without_ids([choice])
    first = streamed.events[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "" if content and not reasoning else None}


def test_malformed_calls_come_back_as_text(server: LiveServer) -> None:
    (choice,) = whole(server, "broken", tools=TOOLS)
    assert "no call" in choice["message"]["content"]
    assert choice["message"]["content"].endswith("done")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert without_ids(folded(server.chat("broken", tools=TOOLS, stream=True))) == without_ids([choice])


def test_a_call_of_no_function_is_the_agents_to_answer(server: LiveServer) -> None:
    (choice,) = whole(server, "stranger", tools=TOOLS)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "unknown"


def test_without_tools_calls_are_text(server: LiveServer) -> None:
    (choice,) = whole(server, "one call")
    assert "tool_calls" not in choice["message"]
    assert '"get_weather"' in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_none_bans_the_token_that_begins_a_call(server: LiveServer) -> None:
    server.chat("one call", tools=TOOLS, tool_choice="none").error(400, "no_token_left")
    assert whole(server, "plain", tools=TOOLS, tool_choice="none")[0]["message"]["content"] == "Just text."


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "visit"}}]}
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "required": ({"tool_choice": "required"}, {"visit", "flag"}),
    "named": ({"tool_choice": {"type": "function", "function": {"name": "flag"}}}, {"flag"}),
    "allowed": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, {"visit"}),
    "one": ({"tool_choice": "required", "parallel_tool_calls": False}, {"visit", "flag"}),
}


@pytest.mark.parametrize("key", CHOICES)
def test_random_weights_call_what_they_must(server: LiveServer, key: str) -> None:
    """Whatever the model would say: from the first token on, calls of the functions that are allowed, which fit."""
    fields, names = CHOICES[key]
    asked = {"tools": [CITY, FLAG], "temperature": 1.5, "max_tokens": 400, "n": 4, "seed": 7, **fields}
    choices = whole(server, "anything", **asked)
    for choice in choices:
        calls = choice["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} <= names
        if choice["finish_reason"] == "length":  # many calls in a row: the last one may be cut off
            calls = calls[:-1]
        assert all(map(fits, calls))
        if key == "one":
            assert len(calls) == 1
            assert choice["finish_reason"] == "tool_calls"
    streamed = folded(server.chat("anything", stream=True, **asked))
    assert without_ids(streamed) == without_ids(choices)


YES: dict[str, Any] = {
    "type": "object",
    "properties": {"said": {"enum": ["<tool_call>", "no"]}},
    "required": ["said"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "yes", "schema": YES}}


def test_random_weights_call_or_answer_in_the_format(server: LiveServer) -> None:
    """With tools and a response format an answer is calls that fit, or a text that fits, and there are both."""
    asked: dict[str, Any] = {"tools": [CITY, FLAG], "response_format": FORM, "temperature": 1.5, "max_tokens": 300,
                             "thinking_token_budget": 3, "n": 8, "seed": 8, "parallel_tool_calls": False}  # fmt: skip
    for opened in (False, True):
        asked["chat_template_kwargs"] = {"thinking": opened}
        choices = whole(server, "anything", **asked)
        for choice in choices:
            message = choice["message"]
            if "tool_calls" in message:
                assert choice["finish_reason"] == "tool_calls"
                assert message["content"] is None
                assert all(map(fits, message["tool_calls"]))
            else:
                assert choice["finish_reason"] == "stop"
                assert json.loads(message["content"])["said"] in {"<tool_call>", "no"}
            assert not opened or message["reasoning"]
        assert len({"tool_calls" in choice["message"] for choice in choices}) == 2
        streamed = folded(server.chat("anything", stream=True, **asked))
        assert without_ids(streamed) == without_ids(choices)
    for fields, called in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "flag"}}}, True),
        ({"tool_choice": "none"}, False),
    ):
        for choice in whole(server, "anything", **asked, **fields):
            assert ("tool_calls" in choice["message"]) is called


def test_calls_and_reasoning_are_counted(server: LiveServer, script: Script) -> None:
    def counts() -> list[float]:
        names: list[tuple[str, dict[str, str]]] = [
            ("quire_tool_calls_total", {"format": "hermes", "outcome": outcome})
            for outcome in ("complete", "malformed", "cut")
        ]
        names += [("quire_reasoning_tokens_total", {}), ("quire_forced_tokens_total", {})]
        return [server.metric(name, **labels) for name, labels in names]

    before = counts()
    server.chat("two calls", tools=TOOLS)
    server.chat("broken", tools=TOOLS)
    server.chat("one call", tools=TOOLS, max_tokens=40)
    server.chat("thinks")
    whole(server, "anything", tools=[FLAG], tool_choice="required", parallel_tool_calls=False)
    thought = len(script.ids("<think>\nIs it 4?\n</think>"))
    server.wait(
        lambda: [now - then for now, then in zip(counts(), before, strict=True)][:4] == [3, 1, 1, thought]
    )
    server.wait(lambda: counts()[4] - before[4] > 20)


def test_schemas_that_cannot_be_enforced_are_named(server: LiveServer) -> None:
    for schema in ({"type": "string", "pattern": "(?<=x)y"}, {"$ref": "http://127.0.0.1:1/x.json"}):
        parameters = {"type": "object", "properties": {"a": schema}}
        strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
        reply = server.chat("plain", tools=[FLAG, strict])
        reply.error(400, "invalid_value")
        assert reply.json["error"]["param"].startswith("tools[1].function.parameters"), reply.text


def test_thinking_ends_with_its_budget(server: LiveServer, script: Script) -> None:
    """Random weights do not close their thinking by themselves."""
    asked: dict[str, Any] = {
        "chat_template_kwargs": {"thinking": True},
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 60,
    }
    closer = len(script.ids("</think>"))
    free = server.chat("anything", **asked).json
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] > 20
    assert free["choices"][0]["message"]["content"] is None
    for budget in (0, 7):
        body = server.chat("anything", thinking_token_budget=budget, **asked).json
        message = body["choices"][0]["message"]
        thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert budget + closer <= thought <= budget + closer + 3, thought
        assert message["content"]
        streamed = server.chat("anything", thinking_token_budget=budget, stream=True, **asked)
        assert without_ids(folded(streamed)) == without_ids(body["choices"])
        continued = {
            "thinking_token_budget": budget,
            "max_tokens": 30,
            "seed": 3,
            "skip_special_tokens": False,
        }
        text = server.complete("anything <think>\n", **continued).json["choices"][0]["text"]
        assert text.index("</think>") <= 7 * budget + 1  # a token may be one of the longest markers
    server.chat("anything", thinking_token_budget=-1).error(400, "invalid_value", "thinking_token_budget")


def test_parts_are_written_past_the_reader(server: LiveServer) -> None:
    """Reasoning takes the path of plain text while the reader waits; the events are the same."""
    taken: list[bool] = []
    take = ChoiceStream.take_parts

    def counted(track: ChoiceStream, parts: Sequence[AnswerPart], now: float) -> bool:
        taken.append(take(track, parts, now))
        return taken[-1]

    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "n": 2}
    for thinking in (True, False):
        asked = {**fields, "chat_template_kwargs": {"thinking": thinking}}
        choices = whole(server, "anything", **asked)
        with mock.patch.object(ChoiceStream, "take_parts", counted):
            for _ in range(20):  # steps that come while the reader is late are all for the reader
                streamed = server.chat("anything", stream=True, **asked)
                assert without_ids(folded(streamed)) == without_ids(choices)
                if any(taken):
                    break
        assert any(taken)
        taken.clear()


@pytest.mark.parametrize("whole", [True, False])
def test_no_event_is_made_for_a_client_that_does_not_read(whole: bool) -> None:
    """Events are numbered: the reader would make the event of the same text again."""
    made: list[object] = []

    class Writer:
        paused = True

        def write_chunk(self, *pieces: bytes) -> int:
            made.append(pieces)
            return 1

    def events(_: int, parts: object) -> bytes:
        made.append(parts)
        return b"event"

    track, writer = ChoiceStream(lambda _: None), Writer()
    track.writer, track.parted, track.whole = writer, True, whole
    track.events_of = track.chunk_of = events
    parts, delta = [AnswerPart(PartKind.TEXT, "x")], StreamDelta(0, "x", [1])
    for paused in (True, False):
        writer.paused = paused
        assert track.take_parts(parts, 1.0) is not paused
        assert track.take_delta(delta, 1.0) is not paused
        assert track.take("x", 1.0) is not paused
        assert bool(made) is not paused


def test_a_response_format_is_for_the_answer_not_the_thinking(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": ON, "strict": True}}
    asked = {"response_format": form, "chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 5}
    (choice,) = whole(server, "anything", max_tokens=200, temperature=1.0, seed=3, **asked)
    assert choice["message"]["reasoning"]
    assert set(json.loads(choice["message"]["content"])) == {"on"}
    assert choice["finish_reason"] == "stop"


def test_no_answer_ends_in_its_thinking(server: LiveServer) -> None:
    """Random weights end it anywhere, also in the middle of a character: what must follow is there, and is whole."""
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": ON, "strict": True}}
    asked: dict[str, Any] = {
        "chat_template_kwargs": {"thinking": True},
        "temperature": 1.5,
        "seed": 7,
        "n": 8,
    }
    formed = whole(server, "anything", response_format=form, max_tokens=300, **asked)
    ended = [choice["message"] for choice in formed if choice["finish_reason"] == "stop"]
    assert len(ended) > 4
    assert all(set(json.loads(message["content"])) == {"on"} for message in ended)
    called = whole(server, "anything", tools=[FLAG], tool_choice="required", max_tokens=300, **asked)
    assert {choice["finish_reason"] for choice in called} <= {"tool_calls", "length"}


def test_several_samples(server: LiveServer) -> None:
    choices = whole(server, "differ", tools=TOOLS, n=3)
    assert [c["message"]["content"] for c in choices[::2]] == ["First.", "Third."]
    assert [c["finish_reason"] for c in choices] == ["stop", "tool_calls", "stop"]
    assert choices[2]["message"]["reasoning"].strip() == "hm"
    assert without_ids(folded(server.chat("differ", tools=TOOLS, n=3, stream=True))) == without_ids(choices)


def test_the_older_form(server: LiveServer) -> None:
    functions = [tool["function"] for tool in TOOLS]
    (choice,) = whole(server, "two calls", functions=functions)
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", json.loads(PARIS))
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert without_ids(folded(server.chat("two calls", functions=functions, stream=True))) == without_ids(
        [choice]
    )


def test_one_call_at_most(server: LiveServer) -> None:
    (choice,) = whole(server, "two calls", tools=TOOLS, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    streamed = server.chat("two calls", tools=TOOLS, parallel_tool_calls=False, stream=True)
    assert without_ids(folded(streamed)) == without_ids([choice])


CHANNELS = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "glm45", "kimi_k2", "granite", "mistral", "command_r",
                                    "openai_gptoss"])  # fmt: skip
def test_reasoning_of_every_family(
    script: Script, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    """From tokens to the message, whole and as events, with the reasoning and without."""
    folder = next(tmp_path_factory.getbasetemp().glob("scripted*/model"))
    reading = AnswerFormat(Tokenizer.from_dir(folder), reasoning_parser=family).reading(None)
    assert reading is not None
    spec = reading.regions.spec.reasoning
    assert spec is not None
    closer = CHANNELS if spec.channel else spec.closer
    ids = script.ids(f"{spec.opener}Is it\n4?{closer}It is 4.")
    least, most = len(script.ids("Is it\n4?")), len(script.ids(f"{spec.opener}Is it\n4?{closer}"))
    request = Request(request_id="r", prompt_token_ids=TokenIds([5]), params=SamplingParams(max_tokens=999))
    for shown, size in itertools.product((True, False), (1, 5)):
        output = OutputBuilder(request, None, reading.tokenizer, lambda _: None, reading=reading)
        form, answer = MessageForm(reasoning=shown), Answer()
        chunks = Chunks(Envelope("i", "o", 0, "m", "f"), 1, chat=True, usage=False)
        events = ChatEvents(chunks, cast(Any, None), form, ids=False)
        data = b""
        for at in range(0, len(ids), size):
            new, last = ids[at : at + size], at + size >= len(ids)
            delta = output.apply(SeqEvent("r", 0, new, None, None, FinishReason.STOP if last else None), 1.0)
            assert delta is not None
            answer.add(delta)
            data += events.chunk_of(0, delta)
        pieces = choice_pieces(output.output.outputs[0], answer, form, cast(Any, None), ids=False)
        whole = json.loads(b"".join(pieces))
        streamed = [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n")[:-1]]
        message = whole["message"]
        assert without_ids(fold(streamed)) == without_ids([whole])
        assert (message["content"], message.get("reasoning")) == ("It is 4.", "Is it\n4?" if shown else None)
        assert message.get("reasoning_content") == message.get("reasoning")
        assert least < output.output.usage.reasoning_tokens <= most


def test_reasoning_can_be_left_out(server: LiveServer) -> None:
    (choice,) = whole(server, "thinks", include_reasoning=False)
    assert set(choice["message"]) == {"role", "content", "refusal"}
    (streamed,) = folded(server.chat("thinks", include_reasoning=False, stream=True))
    assert streamed["message"]["content"] == choice["message"]["content"]
    assert "reasoning" not in streamed["message"]


def test_usage_counts_reasoning(server: LiveServer, script: Script) -> None:
    usage = server.chat("thinks").json["usage"]
    thought = len(script.ids("<think>\nIs it 4?\n</think>"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    *_, last, _ = server.chat("thinks", stream=True, stream_options={"include_usage": True}).events
    assert last["usage"] == usage | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert server.chat("plain").json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_stop_strings_end_the_text_and_no_call(server: LiveServer) -> None:
    (choice,) = whole(server, "stops", tools=TOOLS, stop=["Two"])
    assert choice["message"]["content"] == "One. "
    assert choice["stop_reason"] == "Two"
    (called,) = whole(server, "one call", tools=TOOLS, stop=["city", "get_weather"])
    assert called["finish_reason"] == "tool_calls"  # the arguments contain both
    streamed = server.chat("stops", tools=TOOLS, stop=["Two"], stream=True)
    assert without_ids(folded(streamed)) == without_ids([choice])


def test_logprobs_are_of_all_tokens(server: LiveServer, script: Script) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    (choice,) = whole(server, "ponders", **fields)
    said = script.ids("<think>\nThe weather.\n</think>\n\n" + ONE)
    assert len(choice["logprobs"]["content"]) == len(said) + 1  # and the end of the turn
    assert choice["token_ids"][:-1] == said
    reply = server.chat("ponders", stream=True, **fields)
    (streamed,) = folded(reply)
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    ids = [token for event in reply.events[:-1] for token in event["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]


def test_accepted_drafts_of_an_answer_in_parts_are_named(server: LiveServer, script: Script) -> None:
    """Positions count all tokens, those of reasoning and calls, too."""
    events = ChatEvents(
        Chunks(Envelope("i", "chat.completion.chunk", 0, "m", "f"), 1, chat=True, usage=False),
        TokenTexts(server.engine), MessageForm(), ids=False, marks=DraftMarks([asked_marks([2, 3, 7])]),
    )  # fmt: skip
    reasoning, call = AnswerPart(PartKind.REASONING, "hm"), AnswerPart(PartKind.CALL, "add", 0, "call_1")
    sent = [
        events.chunk_of(0, StreamDelta(0, "", [5, 5, 5], parts=[reasoning])),
        events.chunk_of(0, StreamDelta(0, "", [5, 5], parts=[])),
        events.chunk_of(0, StreamDelta(0, "", [5, 5, 5], parts=[reasoning, call])),
    ]
    named = [
        json.loads(line)["choices"][0]["accepted_drafts"]
        for data in sent
        for line in data.decode().replace("data: ", "").splitlines()
        if "accepted_drafts" in line
    ]
    assert named == [[2], [3], [7]]


def asked_marks(positions: list[int]) -> GenerateAsk:
    """An ask whose drafts at these positions were accepted."""
    request = Request(request_id="r", prompt_token_ids=TokenIds([1]), params=SamplingParams())
    return GenerateAsk(request=request, accepted=[positions])


def test_an_answer_cut_in_a_call(server: LiveServer) -> None:
    """What there is of it is not lost, and it ended by length."""
    (choice,) = whole(server, "one call", tools=TOOLS, max_tokens=40)
    assert choice["finish_reason"] == "length"
    said = json.dumps(choice["message"])
    assert "get_weather" in said
    streamed = server.chat("one call", tools=TOOLS, max_tokens=40, stream=True)
    assert without_ids(folded(streamed)) == without_ids([choice])


def test_a_conversation_with_calls_is_rendered(server: LiveServer) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    chat = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Look it up."},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 °C"},
    ]
    body = {"messages": chat, "tools": TOOLS}
    prompt = server.post("/v1/chat/completions/render", body).json["prompt"]
    assert prompt.startswith("[tools] [")
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"[reasoning] Look it up.{written}" in prompt
    assert "[tool] 21 °C for call_1" in prompt
    assert server.post("/tokenize", body).json["count"] == len(
        server.post("/v1/chat/completions/render", body).json["token_ids"]
    )
    older = [
        chat[0],
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "get_weather", "content": "21 °C"},
    ]
    prompt = server.post("/v1/chat/completions/render", {"messages": older}).json["prompt"]
    assert written in prompt
    assert "[tool] 21 °C for call00001" in prompt


def with_pattern(pattern: str) -> dict[str, Any]:
    """A function, not strict, whose argument has a pattern."""
    parameters = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


NAMED = {"type": "function", "function": {"name": "missing"}}
PATTERN = "tools[0].function.parameters.properties.a.pattern"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "two functions"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "an object with a name"),
    ({"tools": [{"type": "function", "function": {"name": 7}}]}, "tools[0].function.name", "7 is not"),
    ({"tools": TOOLS, "function_call": {"name": "add"}}, "function_call", "needs functions"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "'custom'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[0].function.parameters", "JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters.type", "'array'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]},
     "tools[0].function.parameters.properties.a", "JSON schema"),
    ({"tools": [with_pattern("(a")]}, PATTERN, "a ( without its )"),
    ({"tools": [with_pattern("a**")], "tool_choice": "required"}, PATTERN, "nothing to repeat"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
     "tools[0].function.strict", "true or false"),
    ({"tools": [{**ADD, "function": {"name": f"f{i}"}} for i in range(5000)]}, "tools", "512"),
    ({"tools": [{"type": "weird", "function": {"name": "f"}}]}, "tools[0].type", "'weird'"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice", "'missing'"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", '"required"'),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}},
     "tool_choice.allowed_tools.tools[0]", "'missing'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
    ({"functions": [ADD["function"]], "function_call": {"name": "g"}}, "function_call", "'g'"),
    ({"functions": [ADD["function"]], "tools": TOOLS}, "functions", "tools"),
    ({"tools": "x"}, "tools", "array"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "bool"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "add"}}, "tool_choice", "must be"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "guided_regex": "(a"}, "guided_regex", "guided_regex: "),
    ({"reasoning_effort": 5}, "reasoning_effort", "str"),
    ({"include_reasoning": "x"}, "include_reasoning", "bool"),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget", "int"),
    ({"thinking_token_budget": 2**40}, "thinking_token_budget", "is not an integer in"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
def test_wrong_tools_are_named(server: LiveServer, fields: dict[str, Any], param: str, text: str) -> None:
    assert text in server.chat("plain", **fields).error(400, None, param)


def test_deep_and_large_tools_are_refused(server: LiveServer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(52):
        deep = {"properties": {"a": deep}}
    schema = {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}
    assert "levels deep" in server.chat("plain", **schema).error(400)
    large = {"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}
    assert "characters" in server.chat("plain", tools=[large]).error(400, None, "tools[0]")


def test_templates_without_tools_refuse_them(folder: Path) -> None:
    with serving(folder) as live:
        message = live.chat("hi", tools=TOOLS).error(400, "invalid_value", "tools")
        assert "template ignores tools" in message
