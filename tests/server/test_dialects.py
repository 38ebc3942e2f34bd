"""Every API: any chunking of the engine's output gives the same answer as the unstreamed one; what --api opens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.dialects import (
    SAYS,
    Check,
    SaidRun,
    Speaker,
    events,
    fold_completion,
    fold_generated,
    fold_lines,
    fold_message,
    fold_response,
    fold_tokens,
)
from helpers.scripted import Script, scripted_folder
from helpers.server import serving
from quire.config.serving import APIS, ServingConfig
from quire.engine.api import StreamDelta
from quire.server.app import open_routes
from quire.server.dialects import llama_server_answers, sglang_answers, tgi_answers
from quire.server.dialects.anthropic_answers import MessageHead, MessageStream, message_pieces
from quire.server.dialects.blocks import BlockAnswer
from quire.server.dialects.ollama_answers import AnswerHead, OllamaStream, answer_pieces
from quire.server.dialects.responses_answers import ItemMaker, ResponseStream, ServerTool, complete
from quire.server.dialects.responses_types import ResponseBody
from quire.server.generation import Answer
from quire.types import FinishReason, TokenIds


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = scripted_folder(tmp_path_factory.mktemp("spoken") / "model")
    return Speaker(folder, Script(folder))


def anthropic(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """A message from its events, and whole."""
    head, answer = MessageHead("msg_1", "tiny", 0), BlockAnswer()
    stream = MessageStream(head)
    data = stream.first(cast(Any, run))
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    run.answers = [answer]
    whole = json.loads(b"".join(message_pieces(head, cast(Any, run))))
    return fold_message(events(data + stream.last(cast(Any, run)))), whole


def ollama(deltas: list[StreamDelta], run: SaidRun, *, chat: bool = True) -> tuple[Any, Any]:
    """An answer from its lines, and whole."""
    head, answer = AnswerHead("tiny", "2026-01-01T00:00:00.000000Z", chat), Answer()
    stream = OllamaStream(head, cast(Any, None))
    data = b""
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    run.answers = [answer]
    whole = json.loads(b"".join(answer_pieces(head, cast(Any, None), cast(Any, run))))
    return fold_lines(data + stream.last(cast(Any, run))), whole


def begun() -> ResponseBody:
    return ResponseBody(
        id="resp_1", created_at=1, status="in_progress", background=False, instructions=None,
        max_output_tokens=None, max_tool_calls=None, metadata={}, model="tiny", parallel_tool_calls=True,
        previous_response_id=None, reasoning={}, store=True, temperature=1.0, text={}, tool_choice="auto",
        tools=[], top_p=1.0,
    )  # fmt: skip


def responses(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """A response from its events, and whole."""

    answer, stream = BlockAnswer(), ResponseStream(begun(), 16)
    data = stream.begun
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    made = json.loads(msgspec.json.encode(complete(begun(), answer, cast(Any, run), 16)))
    streamed = fold_response(events(data + stream.last(cast(Any, run))))
    assert (made.pop("completed_at") is None) == (streamed.pop("completed_at") is None)
    return streamed, made


def tool_turns(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """A turn of a response whose calls run on the server, or wait for approval: from its events, and whole."""
    made = []
    for stream in (None, ResponseStream(begun(), 16, maker := ItemMaker("resp_1"))):
        maker.base = 2
        maker.tools = {
            "add": ServerTool("calc", cast(Any, None), "add", approval=False),
            "get_weather": ServerTool("weather", cast(Any, None), "get weather", approval=True),
        }
        answer, data = BlockAnswer(), b""
        for delta in deltas:
            answer.add(delta)
            if stream is not None:
                data += stream.chunk_of(0, delta)
        cut = run.outputs[0].outputs[0].finish_reason is FinishReason.LENGTH
        items = maker.items(answer.blocks, cut=cut)
        if stream is not None:
            data += stream.close(cut=cut)
        for at, item in enumerate(items, 2):
            if item["type"] == "mcp_call":
                item.update({"status": "incomplete"} if cut else {"status": "completed", "output": "5"})
                if stream is not None:
                    data += stream.called(at, item)
        if stream is None:
            made.append(items)
    return _items_of(events(data)), made[0]


def _items_of(found: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The items that events add up to, behind two others."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for name, data in found:
        at = data["output_index"]
        if name == "response.output_item.added":
            assert at == 2 + len(texts)
            texts[at] = ""
        elif name.endswith(".delta"):
            texts[at] += data["delta"]
        elif name == "response.output_item.done":
            items[at] = data["item"]
            if data["item"]["type"] in {"function_call", "mcp_call"}:
                assert data["item"]["arguments"] == texts[at]
            elif data["item"]["type"] != "mcp_approval_request":
                assert data["item"]["content"][0]["text"] == texts[at]
    return [items[at] for at in sorted(items)]


def completion(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """llama-server's completion from its events, and whole."""
    head = llama_server_answers.LlamaServerHead(
        model="tiny", settings={"n_predict": -1}, prompts=["hi"], texts=cast(Any, None), tokens=True
    )
    stream, answer = llama_server_answers.LlamaServerStream(head, [1], 1), Answer()
    data = b""
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    run.answers = [answer]
    whole = json.loads(b"".join(llama_server_answers.answer_pieces(head, cast(Any, run))))
    streamed = fold_completion(data + stream.last(cast(Any, run)))
    assert streamed.pop("timings").keys() == whole.pop("timings").keys()
    return streamed, whole


def generated(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """SGLang's answer from its events, and whole."""
    head = sglang_answers.SglangHead(["a"], [TokenIds([5])])
    stream, answer = sglang_answers.SglangStream(head), Answer()
    stream.begun(cast(Any, run))
    data = b""
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    run.answers = [answer]
    whole = json.loads(b"".join(sglang_answers.answer_pieces(head, cast(Any, run))))
    return fold_generated(data + stream.last(cast(Any, run))), whole


def byte_of(token_id: int) -> tuple[str, bytes]:
    """A vocabulary of bytes; what is above is special."""
    return "", bytes([token_id]) if token_id < 256 else b"<special>"


def tokens(deltas: list[StreamDelta], run: SaidRun) -> tuple[Any, Any]:
    """TGI's answer from its events, and whole."""
    head = tgi_answers.TgiHead(
        texts=byte_of, special=frozenset(range(256, 1000)), prompt=TokenIds([5]), inputs="In: ", seed=7,
        details=True,
    )  # fmt: skip
    stream, answer = tgi_answers.TgiStream(head), Answer()
    data = b""
    for delta in deltas:
        answer.add(delta)
        data += stream.chunk_of(0, delta)
    run.answers = [answer]
    run.outputs[0].usage.prompt_tokens = 1
    whole = json.loads(b"".join(tgi_answers.answer_pieces(head, cast(Any, run))))
    return fold_tokens(data + stream.last(cast(Any, run))), whole


CHECKS: dict[str, Check] = {
    "anthropic": anthropic, "responses": responses, "tool-turns": tool_turns,
    "ollama-chat": ollama, "ollama-generate": partial(ollama, chat=False),
    "llama-server": completion, "sglang": generated, "tgi": tokens,
}  # fmt: skip
# What of an answer is read; not listed: calls too.
READ = {
    "ollama-generate": ["reasoning", "nothing"],
    "llama-server": ["nothing"],
    "sglang": ["nothing"],
    "tgi": ["nothing"],
}
ENDS: list[tuple[FinishReason, str | None]] = [
    (FinishReason.STOP, None), (FinishReason.STOP, "###"), (FinishReason.LENGTH, None),
]  # fmt: skip


def without_ids(answer: Any) -> Any:
    """Ids of calls are each reading's own."""
    return json.loads(re.sub(r"call_[0-9a-f]{24}", "call", json.dumps(answer)))


@pytest.mark.parametrize("api", CHECKS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_same_answer(speaker: Speaker, api: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([*SAYS.values()]))
    if data.draw(st.booleans()):  # cut anywhere, as by max_tokens
        text = text[: data.draw(st.integers(0, len(text)))]
    reason, stop = data.draw(st.sampled_from(ENDS))
    read = data.draw(st.sampled_from(READ.get(api, ["calls", "reasoning", "nothing"])))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    cut: Iterator[int] = itertools.cycle(sizes)
    found, run = speaker.deltas(text, cut, read=read, reason=reason, stop=stop)
    streamed, whole = CHECKS[api](found, run)
    assert streamed == whole
    at_once, run = speaker.deltas(text, itertools.repeat(10_000), read=read, reason=reason, stop=stop)
    assert without_ids(CHECKS[api](at_once, run)[1]) == without_ids(whole)


def test_api_chooses_what_is_open(folder: Path) -> None:
    paths = {name: {route.path for route in open_routes(ServingConfig(api=(name,)))} for name in APIS}
    shared = set.intersection(*paths.values())
    assert {"/health", "/metrics", "/v1/models", "/openapi.json"} <= shared
    every = {route.path for route in open_routes(ServingConfig())}
    assert every == set.union(*paths.values())
    assert ServingConfig(api=("openai, anthropic",)).api == ("openai", "anthropic")
    with pytest.raises(ValueError, match=r"api: 'cohere' is not one of openai, anthropic"):
        ServingConfig(api=("cohere",))
    with serving(folder, api=("anthropic",)) as live:
        live.chat("hi").error(404, "not_found")
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        assert live.post("/v1/messages", body).status == 200
        assert "/v1/chat/completions" not in live.get("/openapi.json").json["paths"]
