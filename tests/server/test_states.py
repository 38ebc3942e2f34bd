"""Health, generation and shutdown in every state of an engine, which a stand-in takes on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from quire.config.serving import ServingConfig
from quire.engine.api import (
    DeadlineError,
    Engine,
    EngineState,
    EngineStats,
    EngineUnavailableError,
    GenerateAsk,
    ModelCard,
    OverloadedError,
    RequestBlockedError,
    Stream,
    StreamDelta,
    TextSink,
)
from quire.engine.usage_ledger import UsageLedger
from quire.engine.view import EngineView
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.app import App
from quire.server.context import ServerContext
from quire.server.metrics import ServerMetrics
from quire.text.chat_renderer import ChatAsk
from quire.types import CheckpointError, FinishReason, QuireError

CARD = ModelCard("stand-in", "None", 100, 50, "0" * 64, None, 0)


class StandInStream:
    """Yields what it is given; an exception among it is raised."""

    def __init__(self, ask: GenerateAsk, steps: Sequence[StreamDelta | Exception]) -> None:
        self.request_id = ask.request.request_id
        self.output = RequestOutput(
            ask.request.request_id, None, list(ask.request.prompt_token_ids), [CompletionOutput(0, "", [])]
        )
        self._steps = steps
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[StreamDelta]:
        for step in self._steps:
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            yield step
        self.output.finished = True

    def deliver_to(self, sinks: Sequence[TextSink]) -> None: ...

    def nudge(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True


class StandInEngine:
    """An engine in any state, whose calls end as the test says."""

    def __init__(self, state: EngineState = EngineState.READY) -> None:
        self.state, self.stats = state, EngineStats()
        self.degraded: tuple[()] = ()
        self.startup: list[dict[str, Any]] = []
        self.ledger = UsageLedger()
        self.request_memory = 2**28
        self.steps: Sequence[StreamDelta | Exception] = ()
        self.failure: Exception | None = None
        self.streams: list[StandInStream] = []

    @property
    def card(self) -> ModelCard:
        if self.state is EngineState.STARTING:
            raise EngineUnavailableError("loading")
        return CARD

    async def start(self) -> None: ...
    async def stop(self, drain_seconds: float) -> None: ...
    async def failed(self) -> None: ...
    async def ping(self, timeout: float) -> bool:
        return True

    async def memory(self) -> Mapping[str, Any]:
        return {}

    async def debug(self, stages: bool = False) -> Mapping[str, Any]:
        return {}

    async def view(self, after: int) -> EngineView:
        return EngineView()

    def tell(self, row: bytes, request_id: str) -> None: ...

    def generate(self, ask: GenerateAsk) -> Stream:
        if self.failure is not None:
            raise self.failure
        self.streams.append(StandInStream(ask, self.steps))
        return self.streams[-1]

    def reading(self, tools: Any) -> None:
        return None

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True, name: str = "prompt"
    ) -> list[int]:
        return [1] * len(text)

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        if self.failure is not None:
            raise self.failure
        return [1, 2, 3]

    async def render_chat(self, ask: ChatAsk) -> str:
        return "text"

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "text"

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return ["t"] * len(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return b"t"


class Answer:
    """Calls the application as a server would, without one."""

    def __init__(self, engine: StandInEngine, path: str, body: bytes | None = None) -> None:
        checked: Engine = engine
        context = ServerContext(checked, ServingConfig(), ServerMetrics(checked))
        self.status, self.headers, self.body = 0, {}, b""
        self._messages = [{"type": "http.request", "body": body or b"", "more_body": False}]
        scope = {
            "type": "http", "method": "GET" if body is None else "POST", "path": path, "http_version": "1.1",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip
        asyncio.run(App(context)(scope, self._receive, self._send))
        self.metrics = context.metrics

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a second response"
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]


CHAT = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":3}'
STREAM = CHAT[:-1] + b',"stream":true}'


@pytest.mark.parametrize("state", EngineState)
def test_every_state(state: EngineState) -> None:
    engine = StandInEngine(state)
    engine.steps = [StreamDelta(0, "a", [1], finish_reason=FinishReason.LENGTH)]
    ready = Answer(engine, "/health/ready")
    assert ready.status == Answer(engine, "/health").status == (200 if state is EngineState.READY else 503)
    assert str(state).encode() in ready.body
    assert Answer(engine, "/health/live").status == 200
    assert Answer(engine, "/metrics").status == 200
    chat = Answer(engine, "/v1/chat/completions", CHAT)
    assert chat.status == ready.status
    if chat.status != 200:
        assert b"retry-after" in chat.headers


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (OverloadedError("9 wait and the limit is 9", 2.5), 429, b"queue_full"),
        (EngineUnavailableError("the engine died", 0.5), 503, b"engine_unavailable"),
        (DeadlineError("late"), 504, b"deadline_exceeded"),
        (CheckpointError("chat template was stopped: too many steps"), 400, b"chat_template_error"),
        (QuireError("something known"), 500, b"engine_error"),
        (ZeroDivisionError("secret detail"), 500, b"internal_error"),
    ],
)
def test_failures_before_the_answer(failure: Exception, status: int, code: bytes) -> None:
    engine = StandInEngine()
    engine.failure = failure
    for body in (CHAT, STREAM):
        answer = Answer(engine, "/v1/chat/completions", body)
        assert answer.status == status
        assert b'"code":"' + code + b'"' in answer.body
        assert b"secret" not in answer.body
    if status == 429:
        assert answer.headers[b"retry-after"] == b"3"
        assert answer.headers[b"retry-after-ms"] == b"2500"


@pytest.mark.parametrize(
    "failure", [DeadlineError("late"), EngineUnavailableError("died"), KeyError("secret")]
)
def test_failures_within_a_stream_end_it_with_an_event(failure: Exception) -> None:
    engine = StandInEngine()
    engine.steps = [StreamDelta(0, "a", [1]), failure]
    answer = Answer(engine, "/v1/chat/completions", STREAM)
    assert answer.status == 200
    *_, last, nothing = answer.body.split(b"\n\n")
    assert last.startswith(b'data: {"error":{')
    assert nothing == b""
    assert b"secret" not in answer.body
    assert engine.streams[0].cancelled
    engine.steps = [failure]  # before any text: a status
    assert Answer(engine, "/v1/chat/completions", STREAM).status >= 500


def test_numbers_that_are_none_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = StandInEngine()
    engine.steps = [StreamDelta(0, "", [], finish_reason=FinishReason.ERROR)]
    answer = Answer(engine, "/v1/chat/completions", CHAT)
    assert answer.status == 500
    assert b"numerical_error" in answer.body
    assert not caplog.records


def test_a_request_that_leaves_no_token_is_at_fault_itself() -> None:
    engine = StandInEngine()
    engine.steps = [StreamDelta(0, "", [], finish_reason=FinishReason.NO_TOKEN)]
    for body in (CHAT, STREAM):
        answer = Answer(engine, "/v1/chat/completions", body)
        assert answer.status == 400
        assert b"no_token_left" in answer.body


def test_admitting_several_prompts_is_all_or_nothing() -> None:
    engine = StandInEngine()
    engine.steps = [StreamDelta(0, "a", [1], finish_reason=FinishReason.STOP)]
    admit = engine.generate
    engine.generate = lambda ask: (
        admit(ask) if len(engine.streams) < 2 else _raise(OverloadedError("full", 1.0))
    )  # type: ignore[method-assign]
    answer = Answer(engine, "/v1/completions", b'{"prompt":["a","b","c"]}')
    assert answer.status == 429
    assert [stream.cancelled for stream in engine.streams] == [True, True]


def _raise(error: Exception) -> Any:
    raise error


def test_error_bodies_stay_small() -> None:
    from quire.server.dialects import ERROR_FORMS
    from quire.server.errors import MAX_ERROR_BYTES, ApiError

    for character in ("a", "\u0000", "\U0001f600", '"'):
        error = ApiError(400, character * 100_000, code="x", param=character * 9000)
        assert all(len(form.body(error)) <= MAX_ERROR_BYTES for form in ERROR_FORMS)


def test_a_request_that_kills_is_not_to_be_tried_again() -> None:
    """A status that no client retries."""
    engine = StandInEngine()
    engine.failure = RequestBlockedError("the engine died 2 times while computing this request")
    answer = Answer(engine, "/v1/chat/completions", CHAT)
    assert answer.status == 400
    assert b'"code":"request_blocked"' in answer.body
