"""Bytes that have no end, in reads of any size: what the protocol keeps of them, what it does for them, what it says.

No verdict here is a clock's. Work is linear because nothing grows: a read costs its own bytes and at most a copy of
what is kept, and what is kept is bounded.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.server import plenty
from helpers.wire import ask, connect, turns
from quire.server.connections import Connections
from quire.server.protocol import MAX_BESIDE_BYTES, MAX_HEADERS, MAX_PIPELINED
from quire.server.request_memory import BODY_BYTE, HEAD

CHUNKED = b"POST %b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /g HTTP/1.1\r\nhost: a\r\n%b\r\n"
# What begins, and what then comes again and again; how it is answered ("" for not at all).
ENDLESS: dict[str, tuple[bytes, bytes, bytes]] = {
    "trailer": (CHUNKED % b"/c" + b"0\r\nt: ", b"a", b"431"),
    "trailer name": (CHUNKED % b"/c" + b"0\r\n", b"a", b"431"),
    "trailers": (CHUNKED % b"/c" + b"0\r\n", b"a: b\r\n", b"431"),
    "trailer after an answer": (CHUNKED % b"/early" + b"0\r\nt: ", b"a", b"200"),
    "trailer name after an answer": (CHUNKED % b"/early" + b"0\r\n", b"a", b"200"),
    "trailer of a GET": ((CHUNKED % b"/early").replace(b"POST", b"GET") + b"0\r\nt: ", b"a", b"200"),
    "trailer after a body": (CHUNKED % b"/c" + b"10000\r\n" + b"x" * 2**16 + b"\r\n0\r\nt: ", b"a", b"431"),
    "chunk extension": (CHUNKED % b"/c" + b"1;", b"x", b"431"),
    "chunk extensions": (CHUNKED % b"/c", b"1;" + b"x" * 99 + b"\r\na\r\n", b"431"),
    "chunks of a byte": (CHUNKED % b"/c", b"1\r\na\r\n", b"431"),
    "chunk size": (CHUNKED % b"/c", b"0", b"431"),
    "chunk size that counts": (CHUNKED % b"/c", b"1", b"400"),
    "blank lines": (b"", b"\r\n", b"431"),
    "blank lines between": (GET % b"", b"\r\n", b"200"),
    "address": (b"GET /", b"a", b"431"),
    "query": (b"GET /?", b"a=b&", b"431"),
    "method": (b"", b"G", b"400"),
    "header name": (b"GET / HTTP/1.1\r\n", b"a", b"431"),
    "header": (b"GET / HTTP/1.1\r\na: ", b"b", b"431"),
    "headers": (b"GET / HTTP/1.1\r\n", b"a:b\r\n", b"431"),
    "white space": (b"GET / HTTP/1.1\r\na: ", b" ", b"431"),
    "requests": (b"", GET % b"", b"200"),
    "requests behind one": (GET.replace(b"/g", b"/never") % b"", GET % b"", b""),
    "bodies behind one": (GET.replace(b"/g", b"/never") % b"", CHUNKED % b"/c" + b"1\r\na\r\n0\r\n\r\n", b""),
    "after the last request": (GET % b"connection: close\r\n", b"GET ", b"200"),
    "after an error": (b"NONSENSE\r\n\r\n", b"x", b"400"),
    "after an error behind one": (GET.replace(b"/g", b"/never") % b"" + b"NONSENSE\r\n\r\n", b"x", b""),
    "other protocols": (b"", GET % b"connection: upgrade\r\nupgrade: h2c\r\n", b"200"),
    "expectations": (b"", CHUNKED.replace(b"host", b"expect: 100-continue\r\nhost") % b"/c" + b"0\r\n\r\n", b"100"),
    "body that is not read": (CHUNKED % b"/early", b"ff\r\n" + b"a" * 255 + b"\r\n", b"200"),
}  # fmt: skip
# What is held for a connection: what may be kept of a message, twice in the moment of a copy, and as much again for
# the read, a body's beginning and objects.
TOTAL = 2**20
KEPT = 4 * MAX_BESIDE_BYTES


def pieces(start: bytes, unit: bytes, size: int, total: int) -> Iterator[bytes]:
    """`total` bytes in reads of `size`."""
    block = unit * (2 * size // len(unit) + 2)
    yield start
    for at in itertools.takewhile(lambda at: at < total, itertools.count(0, size)):
        offset = at % len(unit)
        yield block[offset : offset + size]


async def feed(name: str, size: int, total: int) -> tuple[bytes, int, int]:
    """What is answered, the most memory that was held, and the calls of Python functions."""
    start, unit, _ = ENDLESS[name]
    ((server, wire),) = connect(Connections(10, 600.0), "a", [])
    reads = list(pieces(start, unit, size, total))
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, read in enumerate(reads):
        if wire.closing:
            break
        sys.setprofile(count)
        server.data_received(read)
        sys.setprofile(None)
        if number % 16 == 0:
            await turns()
    await turns()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    sent = wire.sent()
    server.connection_lost(None)
    await turns()
    return sent, peak, calls


@pytest.mark.parametrize("size", [777, 2**18])
@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_grows(name: str, size: int) -> None:
    sent, peak, calls = asyncio.run(feed(name, size, TOTAL))
    status = ENDLESS[name][2]
    assert sent.startswith(b"HTTP/1.1 " + status if status else b""), sent[:200]
    assert len(sent) < 2**20
    assert peak < KEPT + size + 2 * len(sent), peak
    assert calls < 40 * (TOTAL // min(size, 2**14)) + 80_000, calls


@pytest.mark.parametrize(
    "name", ["trailer name", "trailer", "header", "header name", "chunk extension", "address"]
)
def test_nothing_grows_in_small_reads(name: str) -> None:
    """Each read may copy the buffered bytes, which are few: the number of reads counts."""
    sent, peak, calls = asyncio.run(feed(name, 16, MAX_BESIDE_BYTES + 64))
    assert sent.startswith(b"HTTP/1.1 431 ")
    assert peak < KEPT
    assert calls < 2 * MAX_BESIDE_BYTES


def test_headers_of_all_connections_have_one_budget() -> None:
    """The longest idle connections above their share are closed; a client that sends in one piece is answered
    meanwhile.
    """

    async def work() -> None:
        table, logs = Connections(10, 600.0, buffers=100_000), [[] for _ in range(9)]
        held = [connect(table, "a", log)[0] for log in logs]
        for server, _ in held:
            for piece in pieces(b"GET / HTTP/1.1\r\na: ", b"x", 4000, 40_000):
                server.data_received(piece)
                assert table.buffered <= table.buffers
            ((other, wire),) = connect(table, "b", [])
            other.data_received(GET % b"")
            await turns()
            assert wire.sent().startswith(b"HTTP/1.1 200 ")
            other.connection_lost(None)
        sent = [wire.sent() for _, wire in held]
        assert [text[9:12] for text in sent] == [b"503"] * 7 + [b""] * 2
        assert b"of their limit of 97.66 KiB" in sent[0]
        held[-1][0].data_received(b"\r\n\r\n")
        await turns()
        assert held[-1][1].sent().startswith(b"HTTP/1.1 200 ")
        for server, _ in held:
            server.connection_lost(None)
        assert table.buffered == 0

    asyncio.run(work())


def test_buffers_of_tls_count_until_the_connection_ends() -> None:
    async def work() -> None:
        table = Connections(10, 600.0, buffers=320_000)
        pairs = [connect(table, name, [], {"sslcontext": object()})[0] for name in "abc"]
        for server, wire in pairs:
            server.data_received(CHUNKED % b"/c" + b"186a0\r\n" + b"x" * 100_000 + b"\r\n0\r\n\r\n")
            await turns()
            assert wire.sent().startswith(b"HTTP/1.1 200 ")
            assert 100_000 < server.buffered <= table.buffered <= table.buffers
        assert [wire.closing for _, wire in pairs] == [True, False, False]  # the longest idle

    asyncio.run(work())


def test_bodies_count_as_they_arrive() -> None:
    """Before anything reads them, as those of pipelined requests; until the connection ends."""

    async def work() -> None:
        memory = plenty(2**23)
        ((server, wire),) = connect(Connections(10, 600.0, memory=memory), "a", [])
        server.data_received(GET.replace(b"/g", b"/never") % b"")
        first = memory.bodies.used
        assert first >= HEAD
        behind = CHUNKED % b"/c" + b"10000\r\n" + b"x" * 2**16 + b"\r\n0\r\n\r\n"
        server.data_received(behind)
        assert memory.bodies.used >= first + HEAD + BODY_BYTE * 2**16
        for _ in range(8):
            server.data_received(behind)
        assert memory.bodies.used <= memory.bodies.limit
        server.connection_lost(None)
        assert memory.bodies.used == first  # of what runs
        ((server, wire),) = connect(Connections(10, 600.0, memory=memory), "a", [])
        server.data_received(CHUNKED % b"/c")
        for _ in range(100):
            server.data_received(b"1000\r\n" + b"x" * 2**12 + b"\r\n")
        assert memory.bodies.used <= memory.bodies.limit
        await turns()
        assert wire.sent().startswith(b"HTTP/1.1 429 ")

    asyncio.run(work())


def test_trailers_are_not_headers() -> None:
    """They come after the access checks."""
    seen: list[Any] = []

    async def work() -> None:
        ((server, wire),) = connect(Connections(10, 600.0), "a", [])
        server.data_received(CHUNKED % b"/c" + b"0\r\nauthorization: Bearer k\r\nhost: b\r\n\r\n")
        seen.extend(server.scope["headers"])
        await turns()
        assert wire.sent().startswith(b"HTTP/1.1 200 ")

    asyncio.run(work())
    assert [name for name, _ in seen] == [b"host", b"transfer-encoding"]


def test_headers_and_trailers_are_counted_together() -> None:
    def request(headers: int, trailers: int) -> bytes:
        head = CHUNKED.replace(b"host", b"".join(b"a%d: b\r\n" % i for i in range(headers)) + b"host") % b"/c"
        return head + b"0\r\n" + b"".join(b"t%d: u\r\n" % i for i in range(trailers)) + b"\r\n"

    half = MAX_HEADERS // 2
    assert asyncio.run(ask(request(half - 2, half))).startswith(b"HTTP/1.1 200 ")
    assert asyncio.run(ask(request(half - 1, half))).startswith(b"HTTP/1.1 431 ")


def test_too_many_pipelined_requests_are_refused() -> None:
    """After the answers to those that were taken."""
    sent = asyncio.run(ask(GET % b"" * 500))
    assert sent.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
    _, _, last = sent.rpartition(b"HTTP/1.1 ")
    assert last.startswith(b"400 ")
    assert b'"code":"pipelining"' in last


def test_a_request_is_answered_once() -> None:
    """Whether its body is found broken before the application runs, or after it has answered without reading it."""
    broken = CHUNKED % b"/early" + b"x;2\r\n"
    for reads in ([broken], [broken[:-4], broken[-4:]]):
        sent = asyncio.run(ask(*reads))
        assert sent.startswith(b"HTTP/1.1 200 ")
        assert sent.count(b"HTTP/1.1 ") == 1
    sent = asyncio.run(ask(CHUNKED % b"/c" + b"x;2\r\n" + b"x" * 100))
    assert sent.startswith(b"HTTP/1.1 400 ")
    assert sent.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/3.0", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET /", 505),
        (b"GET / HTTP/1.0", 200),
        (b"GET ftp://a/ HTTP/1.1", 400),
        (b"GET http://a:99999/ HTTP/1.1", 400),
        (b"GET http://u:p@a/g?x HTTP/1.1", 200),
    ],
)
def test_request_lines(line: bytes, status: int) -> None:
    sent = asyncio.run(ask(line + b"\r\nhost: a\r\n\r\n"))
    assert sent.startswith(b"HTTP/1.1 %d " % status), sent


def test_a_target_with_a_host_replaces_the_header() -> None:
    async def headers(line: bytes, host: bytes) -> tuple[list[Any], str]:
        ((server, _),) = connect(Connections(10, 600.0), "a", [])
        server.data_received(line + b"\r\n" + host + b"\r\n")
        return list(server.scope["headers"]), server.scope["path"]

    for target, host in (
        (b"http://evil.example/g", b"evil.example"),
        (b"http://evil.example:81?x", b"evil.example:81"),
        (b"https://u@[::2]:1/g", b"[::2]:1"),
    ):
        for version, line in (
            (b"1.1", b"host: localhost\r\n"),
            (b"1.0", b"host: localhost\r\n"),
            (b"1.0", b""),
        ):
            found, path = asyncio.run(headers(b"GET %b HTTP/%b" % (target, version), line))
            assert found == [(b"host", host)]
            assert path == ("/" if b"?" in target else "/g")
    assert (
        asyncio.run(headers(b"GET http://a/ HTTP/1.1", b""))[0] == []
    )  # still without: the application refuses it


# ---- any bytes, cut anywhere

FRAGMENTS = [
    GET % b"", GET % b"connection: close\r\n", CHUNKED % b"/c" + b"1\r\na\r\n0\r\n\r\n",
    CHUNKED % b"/c" + b"3;x=y\r\nabc\r\n00\r\nt: u\r\n\r\n", CHUNKED % b"/early" + b"1\r\na\r\n", b"0\r\n\r\n", b"\r\n",
    CHUNKED % b"/c", b"5\r\nhello\r\n", b"x\r\n", b"POST /p HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc",
    b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\n", b"abc",
    b"GET http://b/ HTTP/1.1\r\nhost: a\r\n\r\n",
    GET % b"connection: upgrade\r\nupgrade: h2c\r\n", b"GET / HTTP/2.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01", b"\x00", b"\xff\xfe", b"GET /\xe4 HTTP/1.1\r\n\r\n", b"a: b\r\n", b" folded\r\n",
    b"GET / HTTP/1.1\r\n", b"host: a\r\n", b"content-length: 99999999999999999999\r\n", b"content-length: -1\r\n",
    b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n", b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", b"trailer: t\r\n", b"te: trailers\r\n", b"\n", b"\r",
]  # fmt: skip


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=20)), max_size=12),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_bytes_cut_anywhere_are_answered_alike(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    whole = asyncio.run(ask(data))
    assert asyncio.run(ask(*(data[a:b] for a, b in itertools.pairwise(ends)))) == whole
    assert whole.count(b"HTTP/1.1 ") <= len(parts) * 2 + 1
