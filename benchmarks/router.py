"""What a router costs: its CPU for each streamed token, and what it adds to the time to the first token.

    python -m benchmarks.router                    64 streams; in turns direct, `quire router`, and nginx if it is there
    python -m benchmarks.router --streams 1000
    python -m benchmarks.router --sglang build/sgl/bin/sglang-router --vllm build/vllm/bin/vllm-router

Two servers of this script write one event of 220 bytes to every stream each `--gap` milliseconds, as engines do after a
step. CPU is that of the router's process, user and system, from the first request to the last byte. Servers, router and
clients share the machine: the first token also waits for them, so compare the columns of one run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.bare_server import BareConnection

EVENT = b"data: " + json.dumps({"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m",
                                "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
                                "x": "." * 60}).encode() + b"\n\n"  # fmt: skip
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Answering(BareConnection):
    """A connection of a server of streams."""

    streams: ClassVar[dict[Answering, int]] = {}

    def posted(self, body: bytes) -> None:
        self.transport.write(HEAD + CHUNK)
        asked = json.loads(body)  # SGLang's router gives the number its newer name
        self.streams[self] = (asked.get("max_tokens") or asked["max_completion_tokens"]) - 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)


def answer(ports: Any, gap: float) -> None:
    """A server."""

    async def run() -> None:
        listener = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
        ports.put(listener.sockets[0].getsockname()[1])
        while True:
            await asyncio.sleep(gap)
            for stream, left in list(Answering.streams.items()):
                stream.transport.write(CHUNK if left else b"0\r\n\r\n")
                if left:
                    Answering.streams[stream] = left - 1
                else:
                    del Answering.streams[stream]

    asyncio.run(run())


def ask(port: int, streams: int, tokens: int, results: Any) -> None:
    """All clients; gives the seconds to the first event of each."""

    async def one(number: int) -> float:
        body = {"model": "m", "max_tokens": tokens, "stream": True,
                "messages": [{"role": "user", "content": f"{number} " * 400}]}  # fmt: skip
        text = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(number * 0.002)
        began = time.perf_counter()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n%s" % (len(text), text))  # fmt: skip
        await reader.readuntil(b"data: ")
        first, tail, events = time.perf_counter() - began, b"", 1
        while not tail.endswith(b"0\r\n\r\n"):
            part = await reader.read(2**16)
            assert part, "closed early"
            events += (tail[-5:] + part).count(b"data: ")
            tail = (tail + part)[-16:]
        writer.close()
        assert events == tokens, (events, tokens)
        return first

    async def run() -> list[float]:
        return await asyncio.gather(*(one(number) for number in range(streams)))

    results.put(asyncio.run(run()))


@contextlib.contextmanager
def router(
    kind: str, ports: list[int], folder: Path, peers: dict[str, list[str]]
) -> Iterator[tuple[int, list[int]]]:
    """A router in front of the servers: its port, and its processes. `peers`: how others than nginx are started."""
    if kind == "direct":
        yield ports[0], []
        return
    if kind == "nginx":
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        (folder / "nginx.conf").write_text(
            f"worker_processes 1; daemon off; pid {folder}/pid; error_log stderr crit; "
            f"events {{ worker_connections 4096; }} "
            f"http {{ access_log off; upstream all {{ {servers} keepalive 2048; }} server {{ listen 127.0.0.1:18099;"
            "location / { proxy_pass http://all; proxy_http_version 1.1; proxy_set_header Connection ''; "
            "proxy_buffering off; } } }"
        )
        command = ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]
        port = 18099
    elif kind in peers:
        urls, port = [f"http://127.0.0.1:{port}" for port in ports], 18097
        command = [
            *peers[kind], "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "cache_aware",
            "--log-level", "error", "--max-concurrent-requests", "4096", "--prometheus-port", "18096",
        ]  # fmt: skip
    else:
        urls, port = [f"http://127.0.0.1:{port}" for port in ports], 18098
        command = [sys.executable, "-m", "quire.cli.main", "router", "--quiet", "--port", str(port)]
        command += ["--backend", *urls]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until_answered(port)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield port, [process.pid, *map(int, children)]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_answered(port: int) -> None:
    """Wait until a router passes a request on."""
    body = json.dumps(
        {"model": "m", "max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "a"}]}
    )
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end, "no answer"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200 and b"data: " in answer.read():
                return
        time.sleep(0.1)


def cpu(pids: list[int]) -> tuple[float, float]:
    """Seconds of CPU that processes have used, and those of them in the kernel."""
    user = system = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, system = user + int(fields[11]), system + int(fields[12])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + system) / tick, system / tick


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--gap", type=float, default=20.0, help="milliseconds between two events of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang", type=Path, metavar="FILE", help="SGLang's router, installed somewhere")
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="vLLM's router, installed somewhere")
    args = parser.parse_args()
    peers: dict[str, list[str]] = {}
    if args.sglang is not None:
        peers["SGLang's router"] = [str(args.sglang.absolute()), "launch"]
    if args.vllm is not None:
        peers["vLLM's router"] = [str(args.vllm.absolute())]
    queue: Any = multiprocessing.Queue()
    servers = [
        multiprocessing.Process(target=answer, args=(queue, args.gap / 1000), daemon=True) for _ in range(2)
    ]
    for server in servers:
        server.start()
    ports = [queue.get() for _ in servers]
    kinds = ["direct", "quire router", *(["nginx"] if shutil.which("nginx") else []), *peers]
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    kernel: dict[str, list[float]] = {kind: [] for kind in kinds}
    firsts: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            with (
                tempfile.TemporaryDirectory() as folder,
                router(kind, ports, Path(folder), peers) as (port, pids),
            ):
                whole, system = cpu(pids)
                client = multiprocessing.Process(target=ask, args=(port, args.streams, args.tokens, queue))
                client.start()
                found = queue.get(timeout=300)
                client.join()
                now, each = cpu(pids), 1e6 / (args.streams * args.tokens)
                costs[kind].append((now[0] - whole) * each)
                kernel[kind].append((now[1] - system) * each)
                firsts[kind].append(statistics.median(found) * 1e3)
    print(
        f"{args.streams} streams of {args.tokens} tokens, an event each {args.gap:g} ms; {args.rounds} rounds"
    )
    print(
        "| | CPU a token, µs: median (range) | of it in the kernel | first event p50, ms |\n|---|--:|--:|--:|"
    )
    for kind in kinds:
        cost, system = sorted(costs[kind]), statistics.median(kernel[kind])
        shown = f"{statistics.median(cost):.1f} ({cost[0]:.1f} to {cost[-1]:.1f}) | {system:.1f}"
        if kind == "direct":
            shown = "– | –"
        print(f"| {kind} | {shown} | {statistics.median(firsts[kind]):.2f} |")


if __name__ == "__main__":
    main()
