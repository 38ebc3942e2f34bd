"""Chunks that go on as they came: whatever a server sends reaches the client once and in order, in its own framing or
in another one.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from helpers.fake_llm import Behaviour
from helpers.routed import routed
from helpers.wire import Wire
from quire.router.passing_connection import PassingConnection, framed, is_one_chunk, payload_of
from quire.router.relay import Relay
from quire.server.queued_writes import QueuedWrites
from quire.util.http_client import SentRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FORMS = (b"%x\r\n%b\r\n", b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n")


def test_chunks_are_told_from_all_else() -> None:
    for size in (*range(1, 300), 2038, 2039, 2040, 2041, 70_000):
        chunk = framed(b"x" * size)
        assert payload_of(chunk) == b"x" * size
        assert payload_of(chunk * 2) == b"x" * size * 2
        assert is_one_chunk(chunk) == (len(chunk) < 2048)
        assert not is_one_chunk(chunk[:-1] + b"x")
    whole = framed(b"one")
    for data in (
        whole[:-1],
        whole + b"0\r\n\r\n",
        b"03\r\none\r\n",
        b"+3\r\none\r\n",
        b"3;a\r\none\r\n",
        b"3\r\nonexx",
    ):
        assert not is_one_chunk(data)
        assert payload_of(data) is None


class Taking:
    """Takes an answer from a connection, and some of its whole chunks past the parser."""

    def __init__(self, generator: random.Random) -> None:
        self.connection = PassingConnection(time.perf_counter)
        self.got, self.passed, self._generator = b"", 0, generator

    def start(self, status: int, headers: dict[str, str]) -> None:
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        self.connection.passes = self.passes

    def data(self, chunk: bytes, at: float) -> None:
        assert at > 0
        self.got += chunk

    def passes(self, data: bytes) -> bool:
        payload = payload_of(data)
        if payload is None or self._generator.random() < 0.2:
            return False
        self.got += payload
        self.passed += 1
        return True


def test_what_is_not_passed_is_parsed() -> None:
    """Chunks of any form, read one by one, several at once, or cut anywhere; and what follows is no part of them."""
    generator = random.Random(7)
    events = [bytes(generator.choices(b"ab\r\n0123:;", k=generator.randrange(1, 300))) for _ in range(2000)]
    pieces, rest = [HEAD], b""
    for event in events:
        rest += generator.choice(FORMS) % (len(event), event)
        if generator.random() < 0.7:
            at = len(rest) if generator.random() < 0.7 else generator.randrange(len(rest))
            pieces.append(rest[:at])
            rest = rest[at:]
    pieces += [rest, b"0\r\nx-trailer: a\r\n", b"\r\n"]

    async def answer() -> Taking:
        taking = Taking(generator)
        connection = taking.connection
        connection.connection_made(Wire("server", []))
        connection.begin(SentRequest(b"", b"", taking, lambda _at: None, lambda _connection: None))
        for piece in filter(None, pieces):
            connection.data_received(piece)
        await connection.end()
        assert connection.passes is None
        return taking

    taking = asyncio.run(answer())
    assert taking.got == b"".join(events)
    assert 100 < taking.passed < len(pieces)


@pytest.mark.parametrize("resume", [True, False])
def test_events_of_a_stream_are_passed(resume: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them; those that are put together with others, or come with the head, are parsed."""
    passed, passes = [0], Relay._pass

    def counted(relay: Relay, writer: QueuedWrites, data: bytes) -> bool:
        done = passes(relay, writer, data)
        passed[0] += done
        return done

    monkeypatch.setattr(Relay, "_pass", counted)
    with routed(*(Behaviour(ttft=0.0, itl=0.002) for _ in range(2)), resume=resume) as router:
        text = router.chat("hello", tokens=50, stream=True).text
        assert (text.count(" word"), text.endswith("data: [DONE]\n\n")) == (50, True)
        assert passed[0] > 0
