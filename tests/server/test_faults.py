"""Faults of the machine, seen from outside a real `quire serve`: its engine dies or hangs, it dies itself, the clock
jumps, and everything at once. Whoever asks again gets the same answer as before; nothing is left behind.

QUIRE_SOAK_REQUESTS=100000 makes the last test a soak.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, descriptors, gone, resident, running, until
from helpers.server import Reply, read_all, request_bytes, serving, stream_text
from quire.cli.main import main
from quire.offline.replay_log import schedule_digest
from quire.steplog import log_rows as rows
from quire.steplog.log_files import read_log

CHAT = "/v1/chat/completions"
FIXED: dict[str, Any] = {"messages": [{"role": "user", "content": "What is next door?"}], "seed": 5, "max_tokens": 40,
                         "ignore_eos": True}  # fmt: skip


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    patience = ("--reader-timeout", "600", "--reader-tokens", "1000000", "--hang-timeout", "0")
    room = (
        "--request-memory",
        "80MiB",
    )  # 40,000 tokens that nobody reads are 23 MiB, and an answer gets half
    with running(folder, "--stall-timeout", "1", "--engine-restarts", "50", *patience, *room) as process:
        yield process


def answer(server: Process) -> str:
    """The neighbour's: always the same. A machine that stands still for a second has a stalled engine."""
    return str(asked(server, FIXED).json["choices"][0]["message"]["content"])


def asked(server: Process, body: dict[str, Any]) -> Reply:
    """An answer, asked for again when it is refused for a time."""
    replies: list[Reply] = []

    def taken() -> bool:
        replies.append(server.request("POST", CHAT, body))
        return replies[-1].status != 503

    until(taken)
    assert replies[-1].status == 200, replies[-1].text
    return replies[-1]


def last_event(sock: socket.socket) -> Any:
    """The last event of a stream that has been ended."""
    _, mark, last = (whole := read_all(sock)).rpartition(b"data: ")
    assert mark, whole
    return json.loads(last.partition(b"\n")[0])


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_killed_engine(server: Process, moment: str) -> None:
    """Retryable errors at once; after the restart the same answers, and no leaks."""
    before, held = answer(server), descriptors(server.process.pid)
    first = server.engine
    whole = socket.create_connection(("127.0.0.1", server.port))
    messages = [
        {"role": "user", "content": f"{moment} " * 9}
    ]  # not the same at two deaths: it would be blamed
    long = {**FIXED, "max_tokens": 40_000, "messages": messages}
    head = "connection: close\r\n"
    if moment == "decode":
        streaming = server.stream(40_000, messages=messages)
        whole.sendall(request_bytes(CHAT, long, headers=head))
    else:
        os.kill(first, signal.SIGSTOP)  # so that the request is there and not begun, or begun and not done
        streaming = socket.create_connection(("127.0.0.1", server.port))
        for sock in (whole, streaming):
            sock.sendall(request_bytes(CHAT, long, headers=head))
        until(lambda: server.metric("quire_waiting_tokens") > 0)
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    head, _, body = read_all(whole).partition(b"\r\n\r\n")
    assert b" 503 " in head.partition(b"\r\n")[0]
    assert b"retry-after: " in head
    assert json.loads(body)["error"]["code"] == "engine_unavailable"
    if moment == "decode":
        assert last_event(streaming)["error"]["code"] == "engine_unavailable"
    else:
        assert read_all(streaming).startswith(b"HTTP/1.1 503 ")
    print(f"told after {time.monotonic() - killed:.3f} s")
    for sock in (whole, streaming):
        sock.close()
    until(server.ready)
    assert server.engine != first
    assert answer(server) == before
    until(lambda: server.metric("quire_kv_blocks_used") == 0)
    until(lambda: descriptors(server.process.pid) <= held)


def test_a_stopped_engine(server: Process) -> None:
    """A frozen engine: the server is alive but not ready, refuses new requests, and continues when the engine does."""
    before, engine = answer(server), server.engine
    expected = stream_text(asked(server, FIXED | {"stream": True, "max_tokens": 1900}))
    sock = server.stream(1900, messages=FIXED["messages"], seed=5)
    with server.standing():
        until(lambda: not server.ready())
        assert server.request("GET", "/health/live").status == 200
        refused = server.request("POST", CHAT, FIXED)
        refused.error(503, "engine_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert b'"stalled"' in server.request("GET", "/health/ready").body
    until(server.ready)
    body = (b"HTTP/1.1 2" + read_all(sock)).partition(b"\r\n\r\n")[2]
    events = b"".join(chunk for chunk in body.split(b"\r\n") if chunk.startswith(b"data: "))
    streamed = Reply(200, {"content-type": "text/event-stream"}, events)
    assert stream_text(streamed) == expected
    sock.close()
    assert (answer(server), server.engine) == (before, engine)


@pytest.mark.parametrize("busy", [True, False])
def test_a_killed_server_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], busy: bool
) -> None:
    """A killed API process: its engine process ends too, and what it has done can be had again."""
    log = tmp_path / "quire.qlog"
    with running(folder, "--record", str(log), "--record-prompts") as server:
        engine, port = server.engine, server.port
        if busy:
            answer(server)
        sock = server.stream(40_000) if busy else None
        server.process.kill()
        server.process.wait()
        until(lambda: gone(engine))
        if sock is not None:
            sock.close()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    if busy:
        check_replays(log, folder, capsys)


def check_replays(log: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to the last step the schedule is the same, and with the model the tokens of the answer that had ended."""
    steps = [row for row in read_log(log).rows if isinstance(row, rows.Step)]
    assert len(steps) > FIXED["max_tokens"]
    for options, tokens in ([], 0), (["--model", str(folder), "--threads", "1"], FIXED["max_tokens"]):
        assert main(["replay", str(log), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["difference"], found["requests"], found["compared_tokens"]) == ("", 2, tokens)
        assert (found["steps"], found["digest"]) == (len(steps), schedule_digest(steps))
        assert f"the log ends after {len(steps)} steps, sequences that had not ended: 1" in found["cut"]


def test_clocks_that_jump(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by a day, forward and back, between any two readings. Only `created` may show it."""
    true, day, looks = time.time, 86_400, [0]

    def jumping() -> float:
        looks[0] += 1
        return true() + (day if looks[0] % 2 else -day)

    with serving(folder) as live:
        expected = live.chat(**FIXED).json["choices"]
        monkeypatch.setattr(time, "time", jumping)
        replies = [
            live.chat(timings=True, deadline_ms=600_000, max_queue_ms=600_000, **FIXED) for _ in range(6)
        ]
        monkeypatch.undo()
        assert looks[0] >= 6
        for reply in replies:
            assert reply.json["choices"] == expected
            assert abs(reply.json["created"] - true()) > day / 2
            timings = reply.json["timings"]
            timings.pop("parts", None)
            total = timings.pop("total_seconds")
            assert 0 < total < 600
            assert sum(timings.values()) == pytest.approx(total)
            assert min(timings.values()) >= 0
        assert live.get("/health/ready").status == 200
        for name in (
            "e2e_request_latency",
            "time_to_first_token",
            "inter_token_latency",
            "request_queue_time",
        ):
            assert 0 <= live.metric(f"quire_{name}_seconds_sum") < 600


class Mix:
    """Clients that do everything at once, from a seed; what they saw."""

    def __init__(self, server: Process, seed: int, kills: int = 0) -> None:
        self.server, self.kills = server, kills
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.hashes: set[str] = set()

    def run(self, requests: int, threads: int = 4) -> None:
        share = [threading.Thread(target=self._client, args=(requests // threads,)) for _ in range(threads)]
        for thread in share:
            thread.start()
        for thread in share:
            thread.join()
        until(self.server.ready)
        until(lambda: self.server.metric("quire_num_requests_running") == 0)

    def _client(self, requests: int) -> None:
        for _ in range(requests):
            with self.lock:
                kind = self.random.choice(("good",) * 4 + tuple(_KINDS))
                if self.kills and self.random.random() < 0.01:
                    self.kills -= 1
                    os.kill(self.server.engine, signal.SIGKILL)
            try:
                saw = self._good() if kind == "good" else f"{kind} {_KINDS[kind](self.server)}"
            except OSError as error:
                saw = f"{kind} {error!r}"
            with self.lock:
                self.seen[saw] += 1

    def _good(self) -> str:
        reply = self.server.request("POST", CHAT, FIXED | {"stream": True})
        if reply.status == 503 or b'"engine_unavailable"' in reply.body:
            return "good, engine died"
        text = stream_text(reply)[0]
        with self.lock:
            self.hashes.add(hashlib.sha256(text.encode()).hexdigest())
        return f"good {reply.status}"


def _leave(server: Process) -> int:
    with server.stream(40_000) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return 0


_KINDS: dict[str, Any] = {
    "not json": lambda server: server.request("POST", CHAT, b'{"messages": [').status,
    "bad value": lambda server: server.request("POST", CHAT, FIXED | {"temperature": -1}).status,
    "unknown model": lambda server: server.request("POST", CHAT, FIXED | {"model": "x"}).status,
    "elsewhere": lambda server: server.request("GET", "/elsewhere").status,
    "too long": lambda server: server.request("POST", "/v1/completions", {"prompt": "word " * 65_000}).status,
    "late": lambda server: server.request("POST", CHAT, FIXED | {"deadline_ms": 1, "n": 4}).status,
    "several": lambda server: server.request("POST", CHAT, FIXED | {"n": 3, "logprobs": True}).status,
    "metrics": lambda server: server.request("GET", "/metrics").status,
    "leaves": _leave,
}


def test_everything_at_once(server: Process) -> None:
    """Mixed requests and faults; memory, descriptors and blocks end where they were after a first round."""
    requests = int(os.environ.get("QUIRE_SOAK_REQUESTS", "160"))
    Mix(server, 0).run(80)
    pid = server.process.pid
    until(lambda: server.metric("quire_kv_blocks_used") == 0)
    memory, files = resident(pid), descriptors(pid)
    mix = Mix(server, 1, kills=max(1, requests // 1000))
    mix.run(requests)
    print(dict(mix.seen), f"memory {(resident(pid) - memory) / 2**20:+.1f} MiB")
    assert len(mix.hashes) == 1
    allowed = {"200", "400", "404", "413", "429", "503", "504", "0"}
    assert {saw.rpartition(" ")[2] for saw in mix.seen if not saw.startswith("good, ")} <= allowed, mix.seen
    until(lambda: descriptors(pid) <= files)
    until(lambda: server.metric("quire_kv_blocks_used") == 0)
    assert resident(pid) - memory < 24 * 2**20
