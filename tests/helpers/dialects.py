"""Answers of a scripted model in every API: how it is read from tokens, and what the events of a stream add up to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.scripted import Script
from quire.engine.api import StreamDelta
from quire.engine.front.output import OutputBuilder
from quire.outputs import RequestOutput
from quire.server.generation import Answer
from quire.server.responses import CompletionTokensDetails, PromptTokensDetails, TimingsBody, UsageBody
from quire.text.reading import AnswerFormat, Reading
from quire.text.tokenizer import Tokenizer
from quire.text.tools import read_tools
from quire.types import FinishReason, Request, SamplingParams, SeqEvent, TokenIds

PARIS = '{"city": "Paris, \\"Île\\""}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAYS = {
    "plain": "Just text: 你好 🌍.",
    "one call": "Let me look.\n" + ONE,
    "two calls": TWO,
    "thinks": "<think>\nIs it 4?\n</think>\n\nIt is 4.",
    "ponders": "<think>\nThe weather.\n</think>\n\n" + ONE,
    "broken": "See:\n<tool_call>\nno call\n</tool_call> done",
    "space": " \n",
    "nothing": "",
}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
]


def say_all(script: Script) -> None:
    """Let each key be answered by its text."""
    for key, text in SAYS.items():
        script.says(key, text)


@dataclass
class SaidRun:
    """As much of an HttpGeneration as the writers of answers need."""

    outputs: list[RequestOutput]
    answers: list[Answer] = field(default_factory=list)

    def usage(self) -> UsageBody:
        return UsageBody(20, 30, 50, PromptTokensDetails(16), CompletionTokensDetails(4))

    def timings(self) -> TimingsBody:
        return TimingsBody(0.1, 0.2, 0.3, 0.4, 0.5, 1.5)


class Speaker:
    """Reads texts as the engine would: from tokens, in chunks of any sizes."""

    def __init__(self, folder: Path, script: Script) -> None:
        self._script = script
        form = AnswerFormat(
            Tokenizer.from_dir(folder), tool_call_parser="hermes", reasoning_parser="qwen3", reads_tools=True
        )
        with_tools = form.reading(read_tools(TOOLS))
        assert with_tools is not None
        self._tokenizer = with_tools.tokenizer
        self._readings: dict[str, Reading | None] = {
            "calls": with_tools, "reasoning": form.reading(None), "nothing": None,
        }  # fmt: skip

    def deltas(
        self, text: str, sizes: Iterator[int], *, read: str, reason: FinishReason, stop: str | None
    ) -> tuple[list[StreamDelta], SaidRun]:
        """The deltas of an answer of which this is `read`: calls, reasoning or nothing; and the run at its end."""
        ids = self._script.ids(text)
        request = Request(
            request_id="r", prompt_token_ids=TokenIds([5]), params=SamplingParams(max_tokens=999)
        )
        output = OutputBuilder(request, None, self._tokenizer, lambda _: None, reading=self._readings[read])
        found, at = [], 0
        while True:
            size = next(sizes)
            new, at = ids[at : at + size], at + size
            last = at >= len(ids)
            delta = output.apply(SeqEvent("r", 0, new, None, None, reason if last else None), 1.0)
            if delta is not None:
                found.append(delta)
            if last:
                output.output.outputs[0].stop_reason = stop
                return found, SaidRun([output.output])


def events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Named server-sent events."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, rest = event.partition("\n")
        assert name.startswith("event: ")
        assert rest.startswith("data: ")
        found.append((name[7:], json.loads(rest[6:])))
    return found


def fold_message(found: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message that Anthropic's events add up to, as its clients add them; the order of events is checked."""
    names = [name for name, _ in found if name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = {}
    open_block: dict[str, Any] | None = None
    for name, data in found:
        assert data["type"] == name
        if name == "message_start":
            message = data["message"]
            assert message["content"] == []
        elif name == "content_block_start":
            assert open_block is None
            assert data["index"] == len(message["content"])
            open_block = data["content_block"] | ({"json": ""} if "input" in data["content_block"] else {})
            message["content"].append(open_block)
        elif name == "content_block_delta":
            assert open_block is message["content"][data["index"]]
            _grow(open_block, data["delta"])
        elif name == "content_block_stop":
            assert open_block is message["content"][data["index"]]
            if "json" in open_block:
                open_block["input"] = _object(open_block.pop("json"))
            open_block = None
        elif name == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    assert open_block is None
    return message


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
        delta["type"]
    )
    if name is None:
        block["json"] += delta["partial_json"]
    else:
        block[name] += delta[name]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def fold_lines(data: bytes) -> dict[str, Any]:
    """The answer that Ollama's lines add up to, as its clients add them."""
    *lines, last = [json.loads(line) for line in data.decode().splitlines()]
    assert last["done"]
    whole: dict[str, Any] = {}
    for line in [*lines, last]:
        assert line["done"] is (line is last)
        said = line.get("message", line)
        for name in ("content", "response", "thinking", "tool_calls"):
            if name in said:
                whole[name] = whole[name] + said[name] if name in whole else said[name]
    scores = [score for line in lines for score in line.get("logprobs", ())]
    last |= {"logprobs": scores} if scores else {}
    if "message" in last:
        return last | {"message": {"role": "assistant"} | whole}
    return last | whole


def fold_response(found: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The response at the end of a stream; its items must be what the events before add up to."""
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    names = [name for name, _ in found]
    assert names[:2] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    scores: list[Any] = []
    text, last = "", found[-1][1]["response"]
    for name, data in found:
        assert data["type"] == name
        if name == "response.output_text.delta":
            scores += data["logprobs"]
        if name == "response.output_item.added":
            assert data["output_index"] == len(items)
            assert data["item"]["status"] == "in_progress"
            text, scores = "", []
        elif name.endswith(".delta"):
            text += data["delta"]
        elif name == "response.function_call_arguments.done":
            assert data["arguments"] == text
        elif name in {"response.output_text.done", "response.reasoning_text.done"}:
            assert data["text"] == text
            assert data.get("logprobs", []) == scores
        elif name == "response.content_part.done":
            assert data["part"]["text"] == text
            assert data["part"].get("logprobs", []) == scores
        elif name == "response.output_item.done":
            items.append(data["item"])
    assert items == last["output"]
    assert names[-1] == f"response.{last['status']}"
    return dict(last)


def fold_completion(data: bytes) -> dict[str, Any]:
    """The answer that llama-server's events add up to, as its clients add them."""
    *events, last = [json.loads(line[6:]) for line in data.decode().split("\n\n")[:-1]]
    assert last["stop"]
    for event in events:
        assert not event["stop"]
        last["content"] += event["content"]
        last["tokens"] += event["tokens"]
    assert last["tokens_predicted"] == len(last["tokens"])
    return dict(last)


def fold_generated(data: bytes) -> dict[str, Any]:
    """The answer at the end of SGLang's events, each of which continues the one before."""
    *lines, end = data.decode().split("\n\n")[:-1]
    assert end == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines]
    for before, event in itertools.pairwise(events):
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    return dict(events[-1])


def fold_tokens(data: bytes) -> dict[str, Any]:
    """The answer that TGI's events add up to; one with a token that has neither text nor logprob is only an end."""
    found = [json.loads(event.removeprefix("data:")) for event in data.decode().split("\n\n")[:-1]]
    assert [event["index"] for event in found] == list(range(1, len(found) + 1))
    assert all(event["generated_text"] is event["details"] is None for event in found[:-1])
    last = found[-1]
    tokens = [event["token"] for event in found if event["token"]["text"] or not event["token"]["special"]]
    details = last["details"] | {"prefill": [], "tokens": tokens}
    assert details.pop("input_length") > 0
    tops = [event["top_tokens"] for event in found if "top_tokens" in event]
    if tops:
        details["top_tokens"] = tops
    return {"generated_text": last["generated_text"], "details": details}


Check = Callable[[list[StreamDelta], SaidRun], tuple[Any, Any]]
