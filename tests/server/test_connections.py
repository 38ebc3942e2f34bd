"""Connections that misbehave: slow, gone, greedy, malformed. Whoever else is served does not notice."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import with_patience
from helpers.server import (
    ENDLESS,
    PATIENT,
    PROBES,
    LiveServer,
    Neighbour,
    Reply,
    plenty,
    read_all,
    request_bytes,
    serving,
    stream_text,
)
from quire.config.serving import ServingConfig
from quire.server.access import AccessControl
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.tenant_access import TenantDirectory

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, "ignore_eos": True, "stream": True
}  # fmt: skip
CHAT = "/v1/chat/completions"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """Few connections; a neighbour that must not notice anything."""
    with serving(folder, max_connections=24) as live:
        live.chat(max_tokens=2)
        before = descriptors()
        neighbour = Neighbour(live)
        yield live
        live.wait(lambda: neighbour.rounds > 3, 60)
        neighbour.stop()
        assert neighbour.differences == []
        live.wait(live.idle)
        live.wait(lambda: descriptors() <= before)


def drop(sock: socket.socket) -> None:
    """Close with a reset, as a process that is killed does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# ---- hanging up


@pytest.mark.parametrize("close", [socket.socket.close, drop], ids=["close", "reset"])
def test_hanging_up_at_every_moment(folder: Path, close: Any) -> None:
    whole = request_bytes(CHAT, LONG)
    with serving(folder, {"max_num_seqs": 1}) as live:
        for part in (0, 1, 20, len(whole) - 1):
            sock = live.connect()
            sock.sendall(whole[:part])
            close(sock)
        for received in (0, 1, 500):  # at once, with the headers, some tokens in
            sock = live.connect()
            sock.sendall(whole)
            if received:
                while len(sock.recv(received)) == 0:
                    pass
            close(sock)
            live.wait(live.idle)
        running, queued = live.connect(), live.connect()
        running.sendall(whole)
        assert running.recv(100)
        queued.sendall(whole)
        close(queued)
        close(running)
        live.wait(live.idle)
        assert live.chat(max_tokens=2).status == 200


def test_hanging_up_on_a_whole_answer_ends_it(folder: Path) -> None:
    body = {**LONG, "stream": False, "max_tokens": 8000, "n": 8}
    with serving(folder, ENDLESS) as live:
        sock = live.connect()
        sock.sendall(request_bytes(CHAT, body))
        live.wait(lambda: live.engine.stats.running > 0)
        sock.close()
        live.counted(8, "quire_request_success_total", finished_reason="abort")
        live.counted(1, "http_requests_total", handler=CHAT, status="499")
        live.wait(live.idle)


def test_half_closing_counts_as_hanging_up(server: LiveServer) -> None:
    with server.connect() as sock:
        sock.sendall(request_bytes(CHAT, LONG))
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    first, second = (request_bytes("/tokenize", {"prompt": text}) for text in ("a", "ab"))
    last = request_bytes("/tokenize", {"prompt": "abc"}, headers="connection: close\r\n")
    with server.connect() as sock:
        sock.sendall(first + second + last)
        answers = read_all(sock)
    assert re.findall(rb'"count":(\d)', answers) == [b"1", b"2", b"3"]


def test_leaving_behind_pipelined_requests(server: LiveServer) -> None:
    sock = server.connect()
    sock.sendall(request_bytes(CHAT, LONG) + request_bytes(CHAT, LONG))
    assert sock.recv(100)
    drop(sock)
    with server.connect() as many:
        many.sendall(request_bytes(CHAT, LONG) * 40)
        assert b'"code":"pipelining"' in read_all(many).rpartition(b"HTTP/1.1 400 ")[2]


# ---- slow and greedy clients


def test_slow_headers_and_bodies_are_ended(folder: Path) -> None:
    whole = request_bytes(CHAT, LONG)

    def check(seconds: float) -> None:
        with (
            serving(folder, header_timeout=seconds, body_timeout=seconds) as live,
            contextlib.ExitStack() as stack,
        ):
            slow_head, slow_body, silent = (stack.enter_context(live.connect()) for _ in range(3))
            slow_head.sendall(whole[:30])
            slow_body.sendall(whole[:-5])
            assert read_all(slow_head).startswith(b"HTTP/1.1 408 ")
            assert read_all(slow_body).startswith(b"HTTP/1.1 408 ")
            assert read_all(silent) == b""

    with_patience(check, 0.4, 4.0, 40.0)


def test_many_slow_connections_do_not_keep_others_out(folder: Path) -> None:
    """More of them than connections allowed: the oldest are closed. Those that are left, when their time is up."""
    with serving(folder, max_connections=24, header_timeout=600.0) as live:
        held = [live.connect() for _ in range(100)]
        for sock in held:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"POST / HTTP/1.1\r\n")
        assert live.get("/health").status == 200
        for sock in held[:77]:  # all but 23, and the one that asked
            assert read_all(sock) == b""
        for sock in held:
            sock.close()


def test_connections_that_are_all_in_use_are_as_many_as_there_may_be(folder: Path) -> None:
    """A further connection is refused with a message; health probes are answered."""
    with serving(folder, ENDLESS, max_connections=3, **PATIENT) as live:
        with live.busy(3):
            assert [live.get(path).status for path in ("/health", "/health/live")] == [200, 200]
            refused = live.get("/v1/models")
            assert "the limit of 3 connections" in refused.error(429, "too_many_connections")
            assert refused.headers["retry-after"] == "1"
        live.wait(lambda: live.get("/health").status == 200)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(10_000)) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 2**20 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 2**20, 431),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef", 400),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na b: c\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
    ids=["10,000 headers", "long header", "long path", "endless header", "length and chunks", "two lengths",
         "bad chunk", "two hosts", "space in a name", "nonsense", "TLS", "bad address", "HTTP/2"],
)  # fmt: skip
def test_malformed_requests(server: LiveServer, head: bytes, status: int) -> None:
    with server.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert b"connection: close" in headers


def test_a_client_that_never_reads_is_ended(folder: Path) -> None:
    """Its output fills the socket's buffers; then its request ends, while a neighbour streams on."""
    body = {**LONG, "max_tokens": 8000, "n": 8, "logprobs": True, "top_logprobs": 10}
    with serving(folder, ENDLESS, reader_timeout=0.5) as live:
        neighbour = Neighbour(live)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", live.port))
        sock.sendall(request_bytes(CHAT, body))
        live.counted(8, "quire_request_success_total", finished_reason="abort")
        neighbour.stop()
        live.wait(live.idle)
        assert neighbour.differences == []
        read_all(sock)  # the buffered output, then the end
        sock.close()


def test_a_slow_client_gets_everything_in_order(folder: Path) -> None:
    """Its output is blocked again and again, so that data written at once and data that had to wait take turns."""
    body = {**LONG, "max_tokens": 1900, "seed": 4, "temperature": 1.5}
    with serving(folder, {"max_model_len": 2000}) as live:
        whole = live.post(CHAT, {**body, "stream": False}).json["choices"][0]["message"]["content"]
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", live.port))
            sock.sendall(request_bytes(CHAT, {**body, "n": 2}, headers="connection: close\r\n"))
            raw = b""
            while part := sock.recv(3000 if len(raw) < 150_000 else 2**20):
                raw += part
        events = b"".join(part for part in raw.split(b"\r\n") if part.startswith(b"data: "))
        texts = stream_text(Reply(200, {"content-type": "text/event-stream"}, events))
        assert texts[0] == whole
        assert len(texts[1]) > 1000
        live.wait(live.idle)


def test_a_full_queue_says_when_to_come_back(folder: Path) -> None:
    """Of many requests at once, as many wait as the queue allows; every other gets a 429 with a time."""
    options = {**PATIENT, "max_num_queued_reqs": 3}
    with serving(folder, ENDLESS | {"max_num_seqs": 2}, **options) as live:
        replies: list[Reply] = []

        def ask() -> None:
            replies.append(live.chat(max_tokens=6, ignore_eos=True))

        threads = [threading.Thread(target=ask) for _ in range(40)]
        with live.busy(2):
            for thread in threads:
                thread.start()
            live.wait(lambda: len(replies) == 37)
        for thread in threads:
            thread.join()
        for refused in replies[:37]:
            assert int(refused.headers["retry-after"]) >= 1
            assert "(limit 3)" in refused.error(429, "queue_full")
        assert [reply.status for reply in replies[37:]] == [200] * 3
        live.wait(live.idle)


# ---- access


@pytest.fixture(scope="module")
def locked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# two people\nkey-one\nkey-two\n")
    keys: dict[str, Any] = {"api_key": ("key-zero",), "api_key_file": str(file)}
    with serving(folder, ENDLESS | {"max_num_seqs": 2}, max_num_queued_reqs=6, **keys, **PATIENT) as live:
        yield live


def test_keys(locked: LiveServer) -> None:
    body = {"messages": LONG["messages"], "max_tokens": 1}
    missing = locked.post(CHAT, body)
    missing.error(401, "missing_api_key")
    assert missing.headers["www-authenticate"] == "Bearer"
    for wrong in (
        "Bearer key-onE",
        "Bearer key-one1",
        "Basic key-one",
        "Bearer",
        "Bearer " + "x" * 50_000,
        "key-one",
    ):
        reply = locked.post(CHAT, body, {"authorization": wrong})
        reply.error(401)
        assert "key-one" not in reply.text
    for key in ("key-zero", "key-one", "key-two"):
        assert locked.post(CHAT, body, {"authorization": f"Bearer {key}"}).status == 200
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        locked.get(path).error(401, "missing_api_key")
    for path in PROBES:
        assert locked.get(path).status == 200


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever key matches, the same comparisons are made, each in constant time."""
    file = tmp_path / "keys"
    file.write_text("one\ntwo\nthree\n")
    config = ServingConfig(api_key_file=str(file))
    access = AccessControl(config, TenantDirectory(config))
    compared: list[bytes] = []
    true = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or true(a, b))
    for presented in ("one", "two", "three", "none", "oneX", "x" * 100_000):
        exchange = Exchange(
            {"method": "GET", "path": "/", "headers": [(b"authorization", f"Bearer {presented}".encode())]},
            None, None, plenty(),  # type: ignore[arg-type]
        )  # fmt: skip
        compared.clear()
        with contextlib.suppress(ApiError):
            access.check_key(exchange)
        assert compared == [b"one", b"two", b"three"]


def test_routes_for_administrators_are_off_by_default(locked: LiveServer) -> None:
    """A key only serves requests; administrative paths do not exist, with a client's key or without."""
    for path in ("/admin/config", "/pause", "/sleep", "/reset_prefix_cache", "/start_profile", "/server_info", "/slots",
                 "/v1/load_lora_adapter", "/update_weights", "/invocations"):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer key-one"}):
            assert locked.post(path, {}, headers).status == 404


def test_a_flood_from_one_key_stops_at_its_share(locked: LiveServer) -> None:
    """Two run, three wait: half of the six places are left. Another key's request waits with them."""
    body = {"messages": LONG["messages"], "max_tokens": 1}
    one = {"authorization": "Bearer key-one"}
    with locked.busy(5, "authorization: Bearer key-one\r\n"):
        for _ in range(10):
            message = locked.post(CHAT, body, one).error(429, "queue_full")
            assert "3 of its requests are waiting, and 3 of 6 places are left" in message
        with locked.busy(1, "authorization: Bearer key-two\r\n"):
            locked.wait(lambda: locked.engine.stats.waiting == 4)
    locked.wait(lambda: locked.post(CHAT, body, one).status == 200)


def test_an_idle_server_refuses_no_key(folder: Path) -> None:
    options: dict[str, Any] = {"api_key": ("one", "two"), "max_num_queued_reqs": 4, **PATIENT}
    with serving(folder, ENDLESS, **options) as live, live.busy(10, "authorization: Bearer one\r\n"):
        live.wait(lambda: live.engine.stats.running == 10)


def test_a_key_finds_only_its_own_cached_blocks(folder: Path) -> None:
    prompt = [*range(4, 104)]
    body = {"prompt": prompt, "max_tokens": 1}

    def cached(live: LiveServer, key: str, **fields: Any) -> int:
        reply = live.post("/v1/completions", body | fields, {"authorization": f"Bearer {key}"})
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(folder, api_key=("one", "two")) as live:
        assert [cached(live, key) for key in ("one", "two", "one", "two")] == [0, 0, 96, 96]
        salt = hashlib.sha256(b"one").hexdigest()
        assert [cached(live, key, cache_salt=salt) for key in ("two", "one", "two")] == [0, 0, 96]
    with serving(folder, api_key=("one", "two"), prefix_cache_sharing="all") as live:
        assert [cached(live, key) for key in ("one", "two")] == [0, 96]


def test_a_flood_with_one_key_leaves_the_cache_of_another(folder: Path) -> None:
    mine = [*range(4, 104)] * 6
    with serving(folder, {"num_kv_blocks": 128, "max_model_len": 1024}, api_key=("one", "two")) as live:

        def cached() -> int:
            reply = live.post(
                "/v1/completions", {"prompt": mine, "max_tokens": 1}, {"authorization": "Bearer one"}
            )
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached(), cached()] == [0, 592]
        flood = {
            "prompt": [[index] * 300 for index in range(4, 44)],
            "max_tokens": 60,
            "ignore_eos": True,
        }
        assert live.post("/v1/completions", flood, {"authorization": "Bearer two"}).status == 200
        assert cached() == 592


def test_host_and_origin(server: LiveServer) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"):
        server.get("/health", {"host": host}).error(403, "host_not_allowed")
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1:80", "[::1]:80"):
        assert server.get("/health", {"host": host}).status == 200
    for origin in ("http://evil.example", "null", "https://localhost.evil.example"):
        reply = server.get("/v1/models", {"origin": origin})
        reply.error(403, "origin_not_allowed")
        assert not any(name.startswith("access-control") for name in reply.headers)
    assert server.get("/v1/models", {"origin": f"http://127.0.0.1:{server.port}"}).status == 200


def raw(server: LiveServer, head: bytes) -> tuple[int, str]:
    """Status and error code of the answer."""
    with server.connect() as sock:
        sock.sendall(head + b"connection: close\r\n\r\n")
        answer, _, body = read_all(sock).partition(b"\r\n\r\n")
    error = json.loads(body).get("error") or {"code": ""}
    return int(answer[9:12]), error["code"]


def test_the_requested_host_must_be_unambiguous(server: LiveServer) -> None:
    for head, answer in (
        (b"GET /health HTTP/1.1\r\n", (400, "invalid_header")),
        (b"GET /health HTTP/1.0\r\n", (200, "")),
        (b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n", (403, "host_not_allowed")),
        (b"GET http://evil.example/health HTTP/1.0\r\n", (403, "host_not_allowed")),
        (b"GET http://localhost:1/health HTTP/1.1\r\nhost: evil.example\r\n", (200, "")),
        (b"GET http://[::1]/health HTTP/1.1\r\nhost: localhost\r\n", (200, "")),
        (b"GET http://localhost/health HTTP/1.1\r\n", (400, "invalid_header")),
        (b"GET /health HTTP/2.0\r\nhost: localhost\r\n", (505, "http_version_not_supported")),
    ):
        assert raw(server, head) == answer, head


def test_headers_that_contradict_each_other(locked: LiveServer) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key-one\r\n"
    assert raw(locked, head)[0] == 200
    for second in (b"Authorization: Bearer key-one\r\n", b"authorization: Bearer wrong\r\n"):
        assert raw(locked, head + second) == (400, "invalid_header")


def test_a_body_that_is_broken_is_one_line_in_the_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with caplog.at_level("DEBUG"):
        for path, status in ((b"/tokenize", 400), (b"/nothing", 404), (b"/v1/chat/completions", 400)):
            with server.connect() as sock:
                sock.sendall(head % path + b"3\r\n{  \r\nxyz\r\n" + b"y" * 100)
                answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


def test_every_host_and_origin(folder: Path) -> None:
    with serving(folder, allowed_hosts=("*",), allowed_origins=("*",)) as live:
        reply = live.get("/v1/models", {"host": "any.example", "origin": "https://page.example"})
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
        assert live.get("/health", {"origin": "null"}).status == 200


def test_listed_hosts_and_origins(folder: Path) -> None:
    page = "https://page.example"
    with serving(folder, allowed_hosts=("api.example",), allowed_origins=(page,)) as live:
        assert live.get("/health", {"host": "api.example:443"}).status == 200
        reply = live.get("/v1/models", {"origin": page})
        assert reply.headers["access-control-allow-origin"] == page
        asked = {"origin": page, "access-control-request-method": "POST"}
        # what the openai package sends in a browser
        names = "authorization,content-type,idempotency-key," + ",".join(
            f"x-stainless-{name}" for name in ("arch", "async", "helper-method", "lang", "os", "package-version",
                                               "retry-count", "runtime", "runtime-version", "timeout")
        )  # fmt: skip
        preflight = live.request("OPTIONS", CHAT, headers=asked | {"access-control-request-headers": names})
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == names
        odd = live.request("OPTIONS", CHAT, headers=asked | {"access-control-request-headers": "a\x9b/b"})
        assert "access-control-allow-headers" not in odd.headers
        refused = live.request("OPTIONS", CHAT, headers={"origin": "https://evil.example"})
        refused.error(403, "origin_not_allowed")
        assert not any(name.startswith("access-control") for name in refused.headers)


# ---- repeated requests


def test_a_repeated_request_gets_the_same_answer(server: LiveServer) -> None:
    for stream in (False, True):
        body = {"messages": LONG["messages"], "max_tokens": 10, "temperature": 1.5, "stream": stream}
        key = {"idempotency-key": f"once-{stream}"}
        first, second = (server.post(CHAT, body, key) for _ in range(2))
        assert first.status == 200
        assert second.body == first.body
        assert second.headers["content-type"] == first.headers["content-type"]
        assert second.headers["idempotency-replayed"] == "true"
        server.post(CHAT, {**body, "max_tokens": 9}, key).error(400, "invalid_value", "idempotency-key")
    bad = server.post(CHAT, {"messages": []}, {"idempotency-key": "bad"})
    bad.error(400)
    assert server.post(CHAT, {**LONG, "max_tokens": 1}, {"idempotency-key": "bad"}).status == 200


def test_a_repetition_during_the_first_request_waits(folder: Path) -> None:
    key, body = "idempotency-key: slow\r\n", {"prompt": "Hi", "max_tokens": 60_000, "ignore_eos": True}
    with serving(folder, ENDLESS, **PATIENT) as live:
        with live.busy(1, key, **body):
            again = {**body, "stream": True}
            reply = live.post("/v1/completions", again, {"idempotency-key": "slow"})
            reply.error(409, "idempotency_key_in_use")
            assert int(reply.headers["retry-after"]) >= 1
        live.wait(live.idle)
