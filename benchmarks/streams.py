"""CPU of the API process for each streamed token, 64 streams at once.

python benchmarks/streams.py                     a stand-in engine: HTTP, events, metrics alone
python benchmarks/streams.py --model FOLDER      the real engine in its own process: with its messages and detokenizing

Clients run in a process of their own. CPU time is this process's, user and system, from the first request to the last
byte, so a request's own cost is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import uvloop

from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import (
    AsyncEngine,
    EngineState,
    EngineStats,
    GenerateAsk,
    ModelCard,
    Stream,
    StreamDelta,
)
from quire.engine.async_engine import AsyncEngine as RealEngine
from quire.server.app import App
from quire.server.context import ServerContext
from quire.server.metrics import ServerMetrics
from quire.server.run import HttpServer, bind
from quire.text.chat import ChatAsk
from quire.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams

TEXT = " token"


class PacedStream:
    """One delta a tick of the engine, as a batch of sequences has it."""

    def __init__(self, ask: GenerateAsk) -> None:
        self.request_id = ask.request_id
        self.output = RequestOutput(ask.request_id, None, [1], [CompletionOutput(0, "", [])])
        self.left = ask.params.max_tokens or 1
        self.ready = 0
        self.waiter: asyncio.Future[None] | None = None

    def push(self) -> None:
        self.ready += 1
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        while not self.ready:
            if self.output.finished:
                raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        tokens, self.ready = self.ready, 0
        self.left -= tokens
        self.output.usage.completion_tokens += tokens
        self.output.finished = self.left <= 0
        return StreamDelta(
            0, TEXT * tokens, [1] * tokens, None, FinishReason.LENGTH if self.left <= 0 else None
        )

    def cancel(self) -> None:
        self.left, self.output.finished = 0, True


class PacedEngine:
    """Ticks as often as everybody has read what the last tick made."""

    state = EngineState.READY
    card = ModelCard("paced", "None", 10**6, 1000, "0" * 64, None, 0)

    def __init__(self) -> None:
        self.streams: list[PacedStream] = []
        self.stats = EngineStats()
        self.ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.ticks = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.streams = [s for s in self.streams if not s.output.finished]
            for stream in self.streams:
                stream.push()
            await asyncio.sleep(0.002)

    async def stop(self, drain_seconds: float) -> None:
        if self.ticks is not None:
            self.ticks.cancel()

    def generate(self, ask: GenerateAsk) -> Stream:
        self.streams.append(PacedStream(ask))
        return self.streams[-1]

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        return [1] * len(text)

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        return [1, 2, 3]

    async def render_chat(self, ask: ChatAsk) -> str:
        return ""

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [TEXT] * len(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return TEXT.encode()

    async def ping(self, timeout: float) -> bool:
        return True

    async def debug(self) -> Mapping[str, Any]:
        return {}


def read_streams(port: int, streams: int, tokens: int, done: Any) -> None:
    """All streams at once, read as bytes."""

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        body = json.dumps({
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True,
            "ignore_eos": True, "temperature": 0,
        }).encode()  # fmt: skip
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        size = chunks = 0
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            part = await reader.read(2**18)
            assert part, "closed early"
            size, chunks = size + len(part), chunks + part.count(b'"content":')
            tail = (tail + part)[-16:]
        writer.close()
        return chunks

    async def everything() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    done.put(uvloop.run(everything()))


def bare(engine: AsyncEngine, tokens: int) -> Any:
    """An application that sends one constant event a delta: what uvicorn and the stand-in cost alone."""
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 230 + b'"}}]}\n\n'
    asked = GenerateAsk(request_id="", prompt_token_ids=[1], params=SamplingParams(max_tokens=tokens))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for _ in engine.generate(asked):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def alone(streams: int, tokens: int) -> None:
    """The application without sockets: events, metrics, the stand-in, and waking a task for each token."""
    engine = PacedEngine()
    app = App(ServerContext(engine, ServingConfig(), ServerMetrics(engine)))
    body = b'{"messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":%d}' % tokens
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "http_version": "1.1",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip

    async def send(_: Any) -> None: ...

    async def one() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()  # nobody hangs up

        await app(dict(scope), receive, send)

    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    while len(engine.streams) < streams:
        await asyncio.sleep(0)
    start = time.process_time()
    while engine.streams:
        engine.streams = [s for s in engine.streams if not s.output.finished]
        for stream in engine.streams:
            stream.push()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    print(f"without sockets: {(time.process_time() - start) / streams / tokens * 1e6:.1f} µs a token")


async def measure(args: argparse.Namespace) -> None:
    config = ServingConfig(port=0)
    engine: AsyncEngine = PacedEngine()
    if args.model:
        engine = RealEngine(args.model, EngineConfig(threads=1, max_num_seqs=args.streams), config)
    server = HttpServer(engine, config)
    if args.bare:
        server._server.config.app = bare(engine, args.tokens)  # before it is loaded
    sock: socket.socket = bind(config)
    await server.start(sock)
    await engine.start()
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Queue()
    for round_number in range(args.rounds + 1):  # the first warms up
        client = spawn.Process(
            target=read_streams, args=(sock.getsockname()[1], args.streams, args.tokens, done)
        )
        client.start()
        await asyncio.sleep(0.2)
        before, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        await asyncio.to_thread(client.join)
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - seconds
        chunks, tokens = done.get(), args.streams * args.tokens
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        system = after.ru_stime - before.ru_stime
        if round_number:
            print(
                f"{tokens} tokens in {chunks} events, {seconds:.2f} s with the client's start:"
                f" {cpu / tokens * 1e6:.1f} µs a token ({system / tokens * 1e6:.1f} in the kernel)"
            )
    await engine.stop(0.0)
    await server.stop()
    if not args.model and not args.bare:
        await alone(args.streams, args.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint folder; default: a stand-in engine")
    parser.add_argument("--bare", action="store_true", help="uvicorn and the stand-in alone, for comparison")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {args.streams} streams of {args.tokens} tokens, {args.model or 'stand-in engine'}"
    )
    uvloop.run(measure(args))


if __name__ == "__main__":
    main()
