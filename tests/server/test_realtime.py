"""The text part of OpenAI's Realtime API over WebSockets: conversations, limits, and sockets cut anywhere."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from helpers.server import ENDLESS, PATIENT, LiveServer, serving
from quire.answers import AnswerPart, PartKind
from quire.server.dialects.responses_answers import ResponseStream
from quire.server.dialects.responses_types import ResponseBody
from quire.server.exchange import TEXT_END
from quire.server.realtime.realtime_events import RealtimeAnswer
from quire.server.realtime.realtime_session import MAX_RESPONSES
from quire.server.realtime.websocket import MAX_MESSAGE_BYTES

HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
SECONDS = 60.0  # for a message to come; no test is decided by it
SHORT: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a token that ends its answers: they are cut by the tests."""
    made = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(folder, made)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (made / name).exists():
            kept = json.loads((made / name).read_text()) | {"eos_token_id": None, "eos_token": None}
            (made / name).write_text(json.dumps(kept))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS, served_model_name=("tiny",), **PATIENT) as live:
        yield live


class Talk:
    """A session as its client sees it."""

    def __init__(self, link: ClientConnection) -> None:
        self.link = link

    def send(self, kind: str, **fields: Any) -> None:
        self.link.send(json.dumps({"type": kind, **fields}))

    def next(self) -> dict[str, Any]:
        return dict(json.loads(self.link.recv(SECONDS)))

    def until(self, kind: str) -> list[dict[str, Any]]:
        """All events up to the first of this kind."""
        events = [self.next()]
        while events[-1]["type"] != kind:
            assert kind == "error" or events[-1]["type"] != "error", events[-1]
            events.append(self.next())
        return events

    def ask(self, **fields: Any) -> list[dict[str, Any]]:
        """Add a message of the user, and wait for the end of the response."""
        self.send("conversation.item.create", item=HELLO)
        self.until("conversation.item.done")
        self.send("response.create", response=SHORT | fields)
        return self.until("response.done")

    def error(self, param: str | None, code: str | None = None) -> dict[str, Any]:
        event = self.next()
        assert event["type"] == "error", event
        assert event["error"]["param"] == param, event
        assert code is None or event["error"]["code"] == code, event
        return dict(event["error"])


@contextlib.contextmanager
def talking(server: LiveServer, query: str = "", **options: Any) -> Iterator[Talk]:
    with connect(f"ws://127.0.0.1:{server.port}/v1/realtime{query}", compression=None, **options) as link:
        talk = Talk(link)
        assert talk.next()["type"] == "session.created"
        yield talk


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def test_a_conversation_is_answered_as_the_same_chat(server: LiveServer) -> None:
    messages: list[dict[str, str]] = []
    with talking(server) as talk:
        for _ in range(2):
            messages.append({"role": "user", "content": "Hello"})
            chat = server.post(
                "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}
            )
            said = chat.json["choices"][0]["message"]["content"]
            events = talk.ask()
            assert text_of(events) == said
            messages.append({"role": "assistant", "content": said})
        kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
        assert kinds == [
            "response.created", "response.output_item.added", "conversation.item.added",
            "response.content_part.added", "response.output_text.done", "response.content_part.done",
            "conversation.item.done", "response.output_item.done", "response.done",
        ]  # fmt: skip
        done = events[-1]["response"]
        assert done["output"][0]["content"] == [{"type": "output_text", "text": said}]
        assert done["usage"]["output_tokens"] == 8
        assert done["usage"]["input_tokens"] == chat.json["usage"]["prompt_tokens"]
        assert done["status"] == "incomplete"
        assert done["status_details"]["reason"] == "max_output_tokens"
        assert {e["response_id"] for e in events if "response_id" in e} == {done["id"]}
        assert len({event["event_id"] for event in events}) == len(events)
    server.wait(server.idle)


def test_openais_client(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    with client.realtime.connect(model="tiny") as link:
        link.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "instructions": "Be kind.",
                     "max_output_tokens": 5}
        )  # fmt: skip
        link.conversation.item.create(item=HELLO)  # type: ignore[arg-type]
        link.response.create()
        events = []
        for event in link:
            events.append(event)
            if event.type == "response.done":
                break
    assert [event.type for event in events[:4]] == [
        "session.created", "session.updated", "conversation.item.added", "conversation.item.done"
    ]  # fmt: skip
    assert events[1].session.instructions == "Be kind."
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output[0].content[0].text != ""


def test_items_have_an_order_and_go_away(server: LiveServer) -> None:
    with talking(server) as talk:
        for name, after in (("b", None), ("a", "root"), ("c", "b"), ("d", None)):
            talk.send("conversation.item.create", item=HELLO | {"id": name}, previous_item_id=after)
            added = talk.until("conversation.item.done")[0]
            assert added["previous_item_id"] == {"a": None, "b": None, "c": "b", "d": "c"}[name]
        talk.send("conversation.item.delete", item_id="c")
        assert talk.next()["item_id"] == "c"
        talk.send("conversation.item.retrieve", item_id="a")
        assert talk.next()["item"]["content"] == HELLO["content"]
        for kind in ("delete", "retrieve"):
            talk.send(f"conversation.item.{kind}", item_id="c")
            talk.error("item_id", "item_not_found")
        talk.send("conversation.item.create", item=HELLO | {"id": "a"})
        talk.error("item.id")
        talk.send("response.create", response=SHORT | {"input": [{"type": "item_reference", "id": "d"}]})
        usage = talk.until("response.done")[-1]["response"]["usage"]
        talk.send("response.create", response=SHORT | {"input": [HELLO], "conversation": "none"})
        done = talk.until("response.done")[-1]["response"]
        assert done["usage"]["input_tokens"] == usage["input_tokens"]
        assert done["conversation_id"] is None


def test_wrong_messages_are_errors_and_the_session_goes_on(server: LiveServer) -> None:
    with talking(server) as talk:
        for text in ("", "{", "[]", '{"type":1}', '{"type":"x","type":"y"}', '{"event_id":"e"}', "\ud7ff"):
            talk.link.send(text)
            assert talk.next()["type"] == "error"
        talk.link.send(b"\x00\x01")
        talk.error(None, "invalid_message")
        wrong: list[tuple[str, dict[str, Any], str]] = [
            ("input_audio_buffer.append", {"audio": ""}, "type"),
            ("session.update", {}, "session"),
            ("session.update", {"session": {"audio": {"input": {}}}}, "session.audio"),
            ("session.update", {"session": {"output_modalities": ["audio"]}}, "session.output_modalities[0]"),
            ("session.update", {"session": {"model": "other"}}, "session.model"),
            ("session.update", {"session": {"max_output_tokens": "many"}}, "session.max_output_tokens"),
            ("conversation.item.create", {}, "item"),
            ("conversation.item.create", {"item": {"role": "nobody"}}, "item.role"),
            ("conversation.item.create", {"item": {"type": "picture"}}, "item.type"),
            ("conversation.item.create", {"item": HELLO, "previous_item_id": "x"}, "previous_item_id"),
            ("response.create", {}, "response.input"),
            ("response.create", {"response": {"prompt": {"id": "p"}}}, "response.prompt"),
            ("response.create", {"response": {"input": [HELLO], "temperature": -1}}, "temperature"),
            ("response.create", {"response": {"input": [HELLO], "max_output_tokens": 0}}, "max_output_tokens"),
            ("response.cancel", {}, "response_id"),
        ]  # fmt: skip
        for kind, fields, param in wrong:
            talk.send(kind, event_id="mine", **fields)
            assert talk.error(param)["event_id"] == "mine"
        assert text_of(talk.ask())


def test_a_response_that_is_cancelled(server: LiveServer) -> None:
    with talking(server) as talk:
        talk.send("conversation.item.create", item=HELLO)
        talk.until("conversation.item.done")
        talk.send("response.create", response={"max_output_tokens": 60_000, "temperature": 0})
        events = talk.until("response.output_text.delta")
        talk.send("response.create")
        events += talk.until("error")
        assert events[-1]["error"]["code"] == "conversation_already_has_active_response"
        talk.send("response.cancel")
        events += talk.until("response.done")
        server.wait(server.idle)
        done = events[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["output"][0]["status"] == "incomplete"
        assert done["output"][0]["content"][0]["text"] == text_of(events) != ""
        talk.send("response.cancel")
        talk.error("response_id", "response_cancel_not_active")
        assert text_of(talk.ask())  # goes on with what was said


def test_responses_beside_the_conversation(server: LiveServer) -> None:
    with talking(server) as talk:
        endless = {"max_output_tokens": 60_000, "input": [HELLO], "conversation": "none"}
        names = []
        for _ in range(MAX_RESPONSES):
            talk.send("response.create", response=endless)
            names.append(talk.until("response.created")[-1]["response"]["id"])
        talk.send("response.create", response=endless)
        talk.until("error")
        for name in names:
            talk.send("response.cancel", response_id=name)
            assert talk.until("response.done")[-1]["response"]["id"] == name
    server.wait(server.idle)


def test_sockets_that_are_cut_anywhere_leave_nothing(server: LiveServer) -> None:
    rng = random.Random(7)
    for _ in range(20):
        link = connect(f"ws://127.0.0.1:{server.port}/v1/realtime", compression=None).__enter__()
        talk = Talk(link)
        for _ in range(rng.randint(1, 3)):
            fields = {"input": [HELLO], "conversation": "none", "max_output_tokens": 60_000}
            talk.send("response.create", response=fields)
        for _ in range(rng.randint(0, 12)):
            talk.next()
        if rng.random() < 0.5:
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_RDWR)
        link.socket.close()
    server.wait(server.idle)
    server.wait(lambda: not server.http.context.memory.bodies.used)
    server.wait(lambda: not server.http._server.server_state.connections)


def test_half_a_handshake_and_half_a_frame(server: LiveServer) -> None:
    head = (
        b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    frame = b"\x81\xfe\x01\x00\x00\x00\x00\x00" + b'{"type":"response.cancel"}'.ljust(256)
    whole = head + frame
    for end in (10, len(head) - 1, len(head), len(head) + 1, len(head) + 9, len(whole) - 1, len(whole)):
        with server.connect() as sock:
            sock.sendall(whole[:end])
            if end >= len(head):
                answer = sock.recv(65536)
                assert answer.startswith(b"HTTP/1.1 101")
                while end == len(whole) and b"response_cancel_not_active" not in answer:
                    answer += sock.recv(65536)
    server.wait(lambda: not server.http._server.server_state.connections)


def test_a_message_over_the_limit(server: LiveServer) -> None:
    with talking(server) as talk:
        with contextlib.suppress(ConnectionClosed):
            talk.link.send("x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosed) as closed:
            talk.link.recv(SECONDS)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_an_idle_socket_is_closed(folder: Path) -> None:
    with (
        serving(folder, websocket_idle_timeout=0.3) as server,
        talking(server) as talk,
        pytest.raises(ConnectionClosed) as closed,
    ):
        talk.link.recv(SECONDS)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


def test_a_client_that_does_not_read_is_ended(folder: Path) -> None:
    with serving(folder, ENDLESS, reader_timeout=1.0, reader_tokens=10**6) as server:
        link = connect(f"ws://127.0.0.1:{server.port}/v1/realtime", compression=None, max_queue=1).__enter__()
        fields = {"input": [HELLO], "max_output_tokens": 60_000}
        link.send(json.dumps({"type": "response.create", "response": fields}))
        server.wait(lambda: server.engine.stats.decode_tokens > 0)
        server.wait(server.idle)
        server.wait(lambda: not server.http._server.server_state.connections)
        link.socket.close()


def test_the_handshake_checks_key_origin_model_and_path(folder: Path) -> None:
    with serving(folder, api_key=("secret", "other"), served_model_name=("tiny",)) as server:
        for options, status, code in (
            ({}, 401, "missing_api_key"),
            ({"additional_headers": {"authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
            ({"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]}, 401, "invalid_api_key"),
            (
                {"additional_headers": {"x-api-key": "secret"}, "origin": "http://evil"},
                403,
                "origin_not_allowed",
            ),
        ):
            with pytest.raises(InvalidStatus) as refused, talking(server, **options):  # type: ignore[arg-type]
                pass
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["code"] == code
        key = {"additional_headers": {"x-api-key": "secret"}}
        with pytest.raises(InvalidStatus) as refused, talking(server, "?model=other", **key):  # type: ignore[arg-type]
            pass
        assert refused.value.response.status_code == 404
        with talking(server, "?model=tiny", **key) as talk:  # type: ignore[arg-type]
            assert text_of(talk.ask())
        with talking(server, subprotocols=["realtime", "openai-insecure-api-key.other"]) as talk:  # type: ignore[list-item]
            assert talk.link.subprotocol == "realtime"
        assert server.get("/v1/realtime", key["additional_headers"]).error(426, "upgrade_required")


def test_without_the_package_the_answer_says_what_to_install(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quire.server.realtime.websocket_protocol", None)
    with pytest.raises(InvalidStatus) as refused, talking(server):
        pass
    assert refused.value.response.status_code == 426
    assert b"quire-llm[websocket]" in refused.value.response.body


def test_a_server_that_stops_closes_its_sockets(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        with serving(folder, ENDLESS) as server:
            talk = stack.enter_context(talking(server))
            talk.send("response.create", response={"input": [HELLO], "max_output_tokens": 60_000})
            talk.until("response.output_text.delta")
        with pytest.raises(ConnectionClosed) as closed:
            for _ in iter(talk.next, None):
                pass
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


def test_a_text_in_pieces_is_the_event_that_its_bytes_are() -> None:
    """What is written past the reader, and what is not, make the same events, also of a response that is cut."""
    body = ResponseBody(
        id="resp_1", created_at=1, status="in_progress", background=False, instructions=None, max_output_tokens=None,
        max_tool_calls=None, metadata={}, model="tiny", parallel_tool_calls=True, previous_response_id=None,
        reasoning={}, store=False, temperature=None, text={}, tool_choice="auto", tools=[], top_p=None, user=None,
    )  # fmt: skip
    slow, fast = (RealtimeAnswer(None, None, itertools.count(1)) for _ in range(2))
    slow.id = fast.id
    usual, quick = ResponseStream(body, 0), ResponseStream(body, 0, form=fast)
    begun = usual.begun + usual.direct(0, [AnswerPart(PartKind.TEXT, 'a"')])
    quick.direct(0, [AnswerPart(PartKind.TEXT, 'a"')])
    before = quick.text_of("b")
    assert before is not None
    assert before[2] is not TEXT_END, "it is not known yet"
    usual.text_of("b")
    assert list(slow.feed(begun + b"".join(before))) == list(fast.feed(begun + b"".join(before)))
    for number, text in enumerate(("é\n", '"}\n\n', "\\", "𝄞", "data: {"), 1):
        pieces, made = usual.text_of(text), quick.text_of(text)
        assert pieces is not None
        assert made is not None
        assert made[2] is TEXT_END
        (event,) = slow.feed(b"".join(pieces))
        assert json.loads(b"".join(made)) == {"event_id": f"event_{number}", **event}
        fast.grow(made[1])
    assert list(slow.cancelled()) == list(fast.cancelled())
    assert fast.around is None
