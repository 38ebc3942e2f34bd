"""Streams that have nothing to say for long: pings, and how far the prompt is."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_connections import drop

from helpers.server import ENDLESS, PATIENT, LiveServer, request_bytes, serving

PING = b": ping\n\n"
LONG = "a prompt that takes many steps " * 8
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/api/chat": {"messages": [{"role": "user", "content": LONG}]},
}


def asked(path: str) -> dict[str, Any]:
    """A request whose answer is always the same."""
    limits: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    if path == "/v1/responses":
        limits["max_output_tokens"] = limits.pop("max_tokens")
    if path == "/api/chat":
        limits = {"options": {"num_predict": 6, "temperature": 0}}
    return {**STREAMS[path], "stream": True, **limits}


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[LiveServer]:
    """One request at a time, in small steps; pings come as often as they can."""
    engine = ENDLESS | {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    with serving(folder, engine, sse_ping_interval=0.02, **PATIENT) as live:
        yield live


def said(body: bytes) -> str:
    """The text of a stream in any form; every piece of it is an event or a comment."""
    text = ""
    for piece in body.decode().split("\n\n"):
        lines = [line for line in piece.split("\n") if not line.startswith((":", "event: "))]
        data = lines[0].removeprefix("data: ") if any(lines) else "{}"
        event = {} if data == "[DONE]" else json.loads(data)
        delta = event.get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
        for choice in event.get("choices", ()):
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def dechunked(sent: bytes) -> bytes:
    """The body of a response in chunks, complete or cut behind one."""
    rest, body = sent.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def read_until(sock: socket.socket, mark: bytes, times: int) -> bytes:
    data = b""
    while data.count(mark) < times:
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize("path", [path for path in STREAMS if path != "/api/chat"])
def test_a_stream_that_waits_has_pings_and_then_the_same_answer(narrow: LiveServer, path: str) -> None:
    ping = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else PING
    alone = narrow.post(path, asked(path))
    assert alone.status == 200
    with narrow.connect() as sock:
        with narrow.busy(1):
            sock.sendall(request_bytes(path, asked(path), headers="connection: close\r\n"))
            data = read_until(sock, ping, 3)
        while part := sock.recv(65536):
            data += part
    body = dechunked(data)
    assert said(body) == said(alone.body) != ""
    if path == "/v1/messages":
        assert body.startswith(b"event: message_start")


def test_lines_of_json_have_no_pings(narrow: LiveServer) -> None:
    reply = narrow.post("/api/chat", asked("/api/chat"))
    assert all(json.loads(line) for line in reply.text.splitlines())


def test_several_prompts_have_pings_as_well(narrow: LiveServer) -> None:
    body = {"prompt": [LONG, "short"], "stream": True, "max_tokens": 6, "temperature": 0}
    with narrow.connect() as sock:
        with narrow.busy(1):
            sock.sendall(request_bytes("/v1/completions", body, headers="connection: close\r\n"))
            data = read_until(sock, PING, 2)
        while part := sock.recv(65536):
            data += part
    assert dechunked(data).endswith(b"data: [DONE]\n\n")


def test_hanging_up_between_pings_leaves_nothing(narrow: LiveServer) -> None:
    with narrow.busy(1):
        for path in STREAMS:
            with narrow.connect() as sock:
                sock.sendall(request_bytes(path, asked(path)))
                if path != "/api/chat":
                    read_until(sock, b"ping", 2)
                drop(sock)
        narrow.wait(lambda: narrow.engine.stats.running == 1 and not narrow.engine.stats.waiting)
    narrow.wait(narrow.idle)


def test_an_error_after_a_ping_is_the_last_event(narrow: LiveServer) -> None:
    path = "/v1/chat/completions"
    with narrow.busy(1), narrow.connect() as sock:
        sock.sendall(request_bytes(path, asked(path), headers="connection: close\r\n"))
        data = read_until(sock, PING, 1)
        narrow.loop.call_soon_threadsafe(narrow.engine._end_all, "the test ends it")
        data += read_until(sock, b'"engine_unavailable"', 1)
    assert data.startswith(b"HTTP/1.1 200")
    assert dechunked(data).startswith(PING)


def test_progress_of_a_prompt(narrow: LiveServer) -> None:
    """After each step of the prompt, before the text, which stays the same."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = asked(path) | {"sse_ping_interval": -1}
        usual = narrow.post(path, body)
        reply = narrow.post(path, body | {"return_progress": True, "cache_salt": path})
        assert reply.status == 200
        told = [event["prompt_progress"] for event in reply.events[:-1] if "prompt_progress" in event]
        total = told[0]["total"]
        processed = [step["processed"] for step in told]  # unread ones are merged
        assert processed == sorted(set(processed) & {*range(32, total, 32), total})
        assert processed[-1] == total
        assert {step["cache"] for step in told} == {0}
        assert {step["total"] for step in told} == {total}
        times = [step["time_ms"] for step in told]
        assert times == sorted(times)
        assert said(reply.body) == said(usual.body) != ""
        again = narrow.post(path, body | {"return_progress": True, "cache_salt": path})
        first = next(e["prompt_progress"] for e in again.events[:-1] if "prompt_progress" in e)
        assert first["processed"] > first["cache"] > 0


def test_progress_of_several_prompts(narrow: LiveServer) -> None:
    body = {"prompt": [LONG, LONG[::-1]], "stream": True, "max_tokens": 2, "return_progress": True,
            "sse_ping_interval": 0}  # fmt: skip
    found = [e for e in narrow.post("/v1/completions", body).events[:-1] if "prompt_progress" in e]
    assert {event["choices"][0]["index"] for event in found} == {0, 1}


def test_bad_options_of_a_stream(narrow: LiveServer) -> None:
    narrow.chat(return_progress=True).error(400, param="return_progress")
    narrow.chat(sse_ping_interval=5).error(400, param="sse_ping_interval")
    for seconds in (0.5, -2, 1e9):
        narrow.chat(stream=True, sse_ping_interval=seconds).error(400, param="sse_ping_interval")
    narrow.chat(stream=True, return_progress="yes").error(400, param="return_progress")
    with pytest.raises(ValueError, match="sse_ping_interval"):
        type(narrow.config)(sse_ping_interval=-1)
