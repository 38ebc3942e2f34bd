"""The operator's hook on output: the same text by every API, whole and streamed; ends, failures, refusals."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving, stream_text
from quire.answers import AnswerPart, PartKind
from quire.config.serving import ServingConfig
from quire.engine.api import Stream, StreamDelta
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.output_hooks import OutputHooks, find_hook
from quire.text.parts import append
from quire.types import FinishReason

PROMPT = "on and on"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def hooks() -> Iterator[ModuleType]:
    """The module of the hooks, on the Python path as an operator's is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import hooks_for_tests

        yield hooks_for_tests


def hooked(folder: Path, function: str, **options: Any) -> Any:
    options = {"output_hook": f"hooks_for_tests:{function}", "output_hook_ms": 60_000.0} | options
    return serving(folder, ENDLESS, served_model_name=("tiny",), **options, **PATIENT)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS, served_model_name=("tiny",), **PATIENT) as live:
        yield live


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with hooked(folder, "mask") as live:
        yield live


def masked(text: str) -> str:
    return "".join(("*" if x in "aeiou" else x) * (1 + number % 2) for number, x in enumerate(text))


def data(reply: Reply) -> list[Any]:
    """The events of a stream, in whichever form."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line[:1] in {"{", "d"}]
    return [json.loads(line) for line in lines if line != "[DONE]"]


APIS: dict[str, tuple[str, Callable[[bool], dict[str, Any]], Callable[[Any], str], Callable[[list[Any]], str]]] = {
    "completions": (
        "/v1/completions", lambda s: {**BODY, "stream": s}, lambda r: r["choices"][0]["text"],
        lambda es: "".join(c["text"] for e in es for c in e["choices"]),
    ),
    "llama-server": (
        "/completion", lambda s: {"prompt": PROMPT, "n_predict": 40, "temperature": 0, "ignore_eos": True, "stream": s},
        lambda r: r["content"], lambda es: "".join(e["content"] for e in es),
    ),
    "sglang": (
        "/generate", lambda s: {"text": PROMPT, "stream": s, "sampling_params": {
            "max_new_tokens": 40, "temperature": 0, "ignore_eos": True}},
        lambda r: r["text"], lambda es: es[-1]["text"],
    ),
    "ollama": (
        "/api/generate", lambda s: {"model": "tiny", "prompt": PROMPT, "raw": True, "stream": s,
                                    "options": {"num_predict": 40, "temperature": 0}},
        lambda r: r["response"], lambda es: "".join(e["response"] for e in es),
    ),
}  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_every_api_has_the_edited_text_whole_and_streamed(
    plain: LiveServer, server: LiveServer, api: str
) -> None:
    path, body, whole, streamed = APIS[api]
    want = masked(whole(plain.post(path, body(False)).json))
    assert want
    assert whole(server.post(path, body(False)).json) == want
    assert streamed(data(server.post(path, body(True)))) == want


def test_tgi_has_it_too(plain: LiveServer, server: LiveServer) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 30, "details": True}}
    want = masked(plain.post("/generate", body).json["generated_text"])
    reply = server.post("/generate", body).json
    assert (reply["generated_text"], reply["details"]["tokens"]) == (want, [])
    assert reply["details"]["generated_tokens"] > 0
    events = data(server.post("/generate_stream", body))
    assert "".join(event["token"]["text"] for event in events) == want
    assert events[-1]["generated_text"] == want


def test_chats_messages_and_responses(plain: LiveServer, server: LiveServer, hooks: ModuleType) -> None:
    chat = {"max_tokens": 30, "temperature": 0}
    want = masked(plain.chat("Hello", **chat).json["choices"][0]["message"]["content"])
    hooks.SEEN.clear()
    assert server.chat("Hello", **chat).json["choices"][0]["message"]["content"] == want
    assert [last for *_, last in hooks.SEEN] == [False] * (len(hooks.SEEN) - 1) + [True]
    assert stream_text(server.chat("Hello", **chat, stream=True))[0] == want
    message = {"max_tokens": 30, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    assert server.post("/v1/messages", message).json["content"][0]["text"] == want
    reply = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 30, "temperature": 0}).json
    assert reply["output"][0]["content"][0]["text"] == want
    several = server.complete(PROMPT, **{k: v for k, v in BODY.items() if k != "prompt"}, n=3, stream=True)
    assert len(set(stream_text(several).values())) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "return_token_ids": True}, "return_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
            "logprobs",
        ),
    ],
)
def test_what_would_show_the_text_is_refused(
    server: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    message = server.post(path, fields).error(400, "unsupported_parameter", param)
    assert "output hook" in message


def test_other_apis_show_no_tokens(server: LiveServer) -> None:
    for events in (
        data(server.post("/completion", {"prompt": "x", "n_predict": 5, "stream": True})),
        data(
            server.post("/generate", {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 5}})
        ),
    ):
        assert all(event.get("tokens", event.get("output_ids")) == [] for event in events)
    reply = server.post("/completion", {"prompt": "x", "return_tokens": True})
    assert "return_tokens" in reply.json["error"]["message"]
    reply = server.post("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}})
    assert "parameters.best_of: not with this server's output hook" in reply.text


def test_a_hook_ends_an_answer(folder: Path, plain: LiveServer) -> None:
    """The engine stops, and each API says so in its way."""
    endless = BODY | {"max_tokens": 60_000}
    with hooked(folder, "five") as server:
        want = plain.post("/v1/completions", BODY).json["choices"][0]["text"][:5]
        for stream in (False, True):
            reply = server.post("/v1/completions", endless | {"stream": stream})
            choice = data(reply)[-1]["choices"][0] if stream else reply.json["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("content_filter", "five is enough")
            assert (stream_text(reply)[0] if stream else choice["text"]) == want
        server.wait(server.idle)
        two = server.post("/v1/completions", endless | {"n": 2}).json["choices"]
        assert [choice["finish_reason"] for choice in two] == ["content_filter"] * 2
        message = {"max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        assert server.post("/v1/messages", message).json["stop_reason"] == "refusal"
        reply = server.post("/v1/responses", {"input": "Hello", "temperature": 0}).json
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
        assert server.metric("quire_output_hook_chunks_total", outcome="ended") >= 6
        assert server.metric("quire_request_success_total", finished_reason="content_filter") >= 6
        server.wait(server.idle)


@pytest.mark.parametrize(
    ("function", "outcome"), [("late", "timeout"), ("broken", "error"), ("wrong", "error")]
)
@pytest.mark.parametrize("policy", ["stop", "pass"])
def test_a_hook_that_fails(
    folder: Path, plain: LiveServer, hooks: ModuleType, caplog: pytest.LogCaptureFixture,
    function: str, outcome: str, policy: str,
) -> None:  # fmt: skip
    want = plain.post("/v1/completions", BODY).json["choices"][0]
    milliseconds = 30.0 if function == "late" else 60_000.0
    hooks.LATE.clear()
    with hooked(folder, function, output_hook_failure=policy, output_hook_ms=milliseconds) as server:
        for _ in range(2):
            found = server.post("/v1/completions", BODY).json["choices"][0]
            if policy == "pass":
                assert (found["text"], found["finish_reason"]) == (want["text"], want["finish_reason"])
            else:
                assert (found["text"], found["finish_reason"]) == ("", "content_filter")
                assert found["stop_reason"] == "output_hook"
        assert server.metric("quire_output_hook_chunks_total", outcome=outcome) == 2
        hooks.LATE.set()
        server.wait(server.idle)
    told = [record.getMessage() for record in caplog.records if "output hook failed" in record.getMessage()]
    assert len(told) == 1
    assert "such answers" in told[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hooks_for_tests", "is not MODULE:FUNCTION"),
        ("no_such_module_here:f", "No module named"),
        ("hooks_for_tests:nothing", "nothing"),
        ("hooks_for_tests:SEEN", "is not a function"),
        ("hooks_for_tests:coroutine", "or an async one"),
    ],
)
def test_a_hook_that_cannot_be_loaded(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"output_hook: .*{text}"):
        find_hook(name)


WHOLE = [
    AnswerPart(PartKind.REASONING, "let me see what there is"), AnswerPart(PartKind.TEXT, "one moment "),
    AnswerPart(PartKind.CALL, "look", 0, "id0"), AnswerPart(PartKind.ARGUMENTS, '{"where": "here"}', 0),
    AnswerPart(PartKind.CALL, "look", 1, "id1"), AnswerPart(PartKind.ARGUMENTS, '{"where": "there"}', 1),
    AnswerPart(PartKind.TEXT, "and done"),
]  # fmt: skip


class Cut:
    """A stream of one answer, cut at random."""

    def __init__(self, draw: random.Random) -> None:
        self.request_id = "r"
        self.output = RequestOutput("r", None, [], [CompletionOutput(0, "", [])])
        pieces: list[AnswerPart] = []
        for part in WHOLE:
            while part.kind is not PartKind.CALL and len(part.text) > 1 and draw.random() < 0.7:
                at = draw.randrange(1, len(part.text))
                pieces.append(AnswerPart(part.kind, part.text[:at], part.call))
                part = AnswerPart(part.kind, part.text[at:], part.call)  # noqa: PLW2901
            pieces.append(part)
        self._deltas: list[StreamDelta] = []
        while pieces:
            count = draw.randint(0, 3)
            parts: list[AnswerPart] = []
            for piece in pieces[:count]:
                append(parts, piece)
            del pieces[:count]
            text = "".join(part.text for part in parts if part.kind is PartKind.TEXT)
            self._deltas.append(StreamDelta(0, text, [1], parts=parts))
        if draw.random() < 0.5:
            self._deltas.append(StreamDelta(0, "", [], parts=[]))
        self._deltas[-1].finish_reason = FinishReason.STOP

    def __aiter__(self) -> Cut:
        return self

    async def __anext__(self) -> StreamDelta:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)


def test_parts_are_edited_one_by_one_wherever_they_are_cut(hooks: ModuleType) -> None:
    """Each region by itself, closed before the next one begins; names of functions stay."""

    async def read(draw: random.Random, threads: OutputHooks) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        async for delta in threads.wrap(cast(Stream, Cut(draw))):
            assert delta.text == "".join(p.text for p in delta.parts or () if p.kind is PartKind.TEXT)
            for part in delta.parts or ():
                append(found, part)
        return found

    threads = OutputHooks(
        ServingConfig(output_hook="hooks_for_tests:upper", output_hook_ms=60_000), Counter()
    )
    want = [
        part if part.kind is PartKind.CALL else AnswerPart(part.kind, f"<{part.text.upper()}>", part.call)
        for part in WHOLE
    ]
    for seed in range(60):
        hooks.SEEN.clear()
        assert asyncio.run(read(random.Random(seed), threads)) == want, seed
        assert [kind for kind, _, last in hooks.SEEN if last] == [
            "reasoning", "text", "arguments", "arguments", "text"
        ]  # fmt: skip
    threads.close()
