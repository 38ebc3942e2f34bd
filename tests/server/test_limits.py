"""What strangers may hold: connections from the moment they are accepted, descriptors, answers they do not read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.certificates import make_certificate
from helpers.cgroup import ProcessGroup, limited
from helpers.process import Process, descriptors, running, until
from helpers.server import LiveServer, read_all, request_bytes, serving
from helpers.wire import connect, turns
from quire.cli.main import main
from quire.engine.host.held import CONNECTION, TLS_CONNECTION
from quire.server import connections
from quire.server.connections import SPARE, Connections, TooFewDescriptorsError, fit_descriptors
from quire.util.platform import resident_exactly


@contextlib.contextmanager
def idle(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(number)
        ]


def test_handshakes_count_and_have_the_time_of_headers(folder: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate, "first")
    options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--max-connections", "8")
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False

    def ask(path: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port)) as raw, context.wrap_socket(raw) as sock:
            sock.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path)
            return read_all(sock)

    with running(folder, *options, "--header-timeout", "600") as server:
        before = descriptors(server.process.pid)
        with idle(server.port, 100) as held:
            assert ask(b"/health").startswith(b"HTTP/1.1 200 ")
            until(lambda: descriptors(server.process.pid) <= before + 8)
            assert [read_all(sock) for sock in held[:92]] == [b""] * 92  # dropped, the oldest first
            held[99].sendall(b"\x16\x03\x01")  # still there
        until(lambda: descriptors(server.process.pid) <= before)
    with running(folder, *options, "--header-timeout", "0.3") as server:
        before = descriptors(server.process.pid)
        with idle(server.port, 3) as held:
            held[0].sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # a beginning
            assert [read_all(sock) for sock in held] == [b""] * 3
        until(lambda: descriptors(server.process.pid) <= before)
        assert server.end()[0] == 0


def long_answer() -> bytes:
    """A request for an answer that no buffer between the two holds."""
    body = {"prompt": [5] * 2500, "max_tokens": 1, "prompt_logprobs": 20}
    return request_bytes("/v1/completions", body)


def ask_and_do_not_read(live: LiveServer) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", live.port))
    sock.sendall(long_answer())
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def test_whole_answers_that_are_not_read_are_dropped(folder: Path) -> None:
    with serving(folder, {"max_model_len": 2600}, reader_timeout=0.4, keep_alive_timeout=600.0) as live:
        held = live.http.context.connections
        with ask_and_do_not_read(live):
            live.wait(lambda: not held)
        with ask_and_do_not_read(live) as sock:  # and a request behind it, whose answer waits
            sock.sendall(request_bytes("/tokenize", {"prompt": "a"}))
            live.wait(lambda: not held)


def test_whole_answers_that_are_not_read_count_as_connections(folder: Path) -> None:
    with serving(folder, {"max_model_len": 2600}, max_connections=1, reader_timeout=600.0) as live:
        with ask_and_do_not_read(live):
            live.post("/tokenize", {"prompt": "a"}).error(429, "too_many_connections", None)
            assert live.get("/health").status == 200
        live.wait(lambda: live.post("/tokenize", {"prompt": "a"}).status == 200)


def test_a_slow_reader_of_a_whole_answer_has_time_while_it_reads() -> None:
    async def work() -> None:
        ((server, wire),) = connect(Connections(10, 600.0), "a", [])
        server.data_received(b"GET /g HTTP/1.1\r\nhost: a\r\n\r\n")
        await turns()
        seconds = []
        for wire.buffered in (200_000, 200_000, 190_000, 160_000, 160_000, 200_000, 200_000, 0, 0, 100, 90):
            seconds.append(server.waiting(1.0))
        assert seconds == [0, 1, 2, 0, 1, 0, 1, 0, 0, 0, 1]
        server.data_received(b"GET /never HTTP/1.1\r\nhost: a\r\n\r\n")  # a stream has a watch of its own
        assert server.waiting(1.0) == 0
        server.pause_writing()  # it waits
        assert [server.waiting(1.0), server.waiting(1.0)] == [0, 1]
        server.resume_writing()
        server.pause_writing()  # it has read, and waits again
        assert server.waiting(1.0) == 0
        server.connection_lost(None)

    asyncio.run(work())


def test_few_descriptors(folder: Path) -> None:
    """As many connections as descriptors allow; every client gets an answer, and nothing is reset."""
    with running(folder, "--header-timeout", "600", files=300) as server:
        notices = [line for line in server.lines if "--max-connections" in line]
        assert len(notices) == 1
        assert "is lowered to" in notices[0]
        with idle(server.port, 500):
            for _ in range(20):
                assert server.request("GET", "/health").status == 200
            assert descriptors(server.process.pid) < 300
        status, log = server.end()
        assert status == 0
        assert "no connection can be accepted" not in log


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "raised", "allowed"),
    [
        (1024, 4096, 500, 1024, 500),
        (1024, 2**20, 4096, 4096, 4096),
        (1024, 2048, 4096, 2048, 0),
        (1024, resource.RLIM_INFINITY, 4096, 4096, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, resource.RLIM_INFINITY, 4096),
    ],
)
def test_the_limit_of_open_files(
    soft: int, hard: int, asked: int, raised: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    got = fit_descriptors(asked)
    now = limits[-1][0]
    assert now == raised if now in {soft, hard} else now > raised + SPARE
    assert got == allowed or (not allowed and 2048 - 512 < got < 2048)


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_holds_the_planned_memory(folder: Path, tmp_path: Path, *, tls: bool) -> None:
    """After a request, when it is idle."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate, "first")
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) if tls else ()
    with running(folder, *options, "--keep-alive-timeout", "600") as server, contextlib.ExitStack() as stack:

        def asked() -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock = stack.enter_context(context.wrap_socket(sock)) if tls else sock
            sock.sendall(
                b"GET /health HTTP/1.1\r\nhost: localhost\r\nuser-agent: test\r\naccept: */*\r\n\r\n"
            )
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            return sock

        for sock in [asked() for _ in range(20)]:
            sock.close()
        with socket.create_connection(("127.0.0.1", server.port)):  # they have been closed there too
            time.sleep(0.5)
        sizes = [resident_exactly(server.process.pid)]
        for _ in range(2):
            for _ in range(400):
                asked()
            sizes.append(resident_exactly(server.process.pid))
    # what else the server did for the first time is in one of them
    each = min(after - before for before, after in itertools.pairwise(sizes)) / 400
    planned = TLS_CONNECTION if tls else CONNECTION
    print(f"{each / 1024:.1f} KiB of {planned / 1024:g}")
    assert 0.6 * planned < each <= planned


@pytest.mark.parametrize(
    ("command", "option", "value", "status", "text"),
    [
        ("serve", "--threads", "100000", 2, "threads: 100000 exceeds the limit of 1024"),
        ("generate", "--threads", "100000", 2, "threads: 100000 exceeds the limit of 1024"),
        ("serve", "--max-num-seqs", "99999999999", 2, "max_num_seqs: 99999999999 exceeds the limit of 65536"),
        (
            "generate",
            "--max-num-seqs",
            "99999999999",
            2,
            "max_num_seqs: 99999999999 exceeds the limit of 65536",
        ),
        ("serve", "--memory", "99999999GiB", 1, "memory: 97656.25 TiB is more than "),
        ("generate", "--memory", "99999999GiB", 1, "memory: 97656.25 TiB is more than "),
        ("serve", "--request-memory", "99999999GiB", 1, "lower --request-memory"),
        ("serve", "--num-kv-blocks", "99999999999", 2, "num_kv_blocks: 99999999999 exceeds the limit of"),
    ],
)
def test_numbers_that_no_machine_has(
    folder: Path,
    command: str,
    option: str,
    value: str,
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused by name and limit, before anything is allocated."""
    more = ["--port", "0"] if command == "serve" else ["--prompt", "hi"]
    assert main([command, str(folder), *more, option, value]) == status
    assert text in capsys.readouterr().err


def test_too_few_processes_for_the_threads(folder: Path) -> None:
    """Whichever thread cannot be started, the start ends and says so; a server that has started has all it needs."""
    serve = ["serve", str(folder), "--port", "0", "--threads", "3"]
    generate = ["generate", str(folder), "--prompt", "hi", "--threads", "3"]
    for limit, words in ((1, serve), (4, serve), (11, serve), (2, generate)):
        command = [sys.executable, "-m", "quire", *words]
        with limited(ProcessGroup, limit) as group:
            if group is None:
                pytest.skip("no control group of processes can be made here")
            run = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=group.join)
        assert run.returncode in {1, 2}, (limit, run.stderr)
        assert "the pids limit of the container" in run.stderr, (limit, run.stderr)
        assert "Traceback" not in run.stderr
    assert "threads: the system started 2 of 3" in run.stderr
    with limited(ProcessGroup, 40) as group:
        assert group is not None
        server = Process(folder, "--port", "0", before=group.join)
        try:
            bodies = [{"prompt": "hi " * size, "max_tokens": 2} for size in (1, 9000)]
            assert [server.request("POST", "/v1/completions", body).status for body in bodies] == [200, 200]
        finally:
            server.end()


def test_no_descriptors_to_serve_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(TooFewDescriptorsError, match="only 64 files"):
        fit_descriptors(4096)


def test_a_listener_that_is_out_of_descriptors_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting client is turned away, and the loop does not spin."""
    with serving(folder) as live:
        calls: list[int] = []

        class Socket(socket.socket):
            def accept(self) -> Any:
                calls.append(1)
                raise OSError(24, "Too many open files")

        listener = live.http._server.servers[0]
        true: socket.socket = listener._socket  # type: ignore[attr-defined]
        monkeypatch.setattr(connections, "_PAUSE_SECONDS", 0.01)
        listener._socket = Socket(fileno=socket.dup(true.fileno()))  # type: ignore[attr-defined]
        with live.connect() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            live.wait(lambda: len(calls) > 3)
            listener._socket.close()  # type: ignore[attr-defined]
            listener._socket = true  # type: ignore[attr-defined]
            assert read_all(sock).startswith(b"HTTP/1.1 200 ")
