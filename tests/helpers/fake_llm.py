"""A server of known latencies that speaks every API the benchmark client knows.

`respond` is pure: a request in, (pause, bytes) out. Tests run it on a virtual clock (tests/bench/virtual.py),
scripts on a real socket (`main`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

END = b"0\r\n\r\n"


@dataclass
class Behaviour:
    """First token after `ttft` seconds, then one chunk of `per_chunk` tokens every `itl` seconds."""

    ttft: float = 0.1
    itl: float = 0.02
    per_chunk: int = 1
    usage: bool = True
    eos: bool = False  # the last token has no text and comes with the finish reason
    stall: dict[int, float] = field(
        default_factory=dict
    )  # request number -> more seconds before its first token
    refuse: set[int] = field(default_factory=set)  # request numbers answered with 429
    cut: set[int] = field(default_factory=set)  # request numbers whose stream breaks off
    crlf: bool = False


class FakeLLM:
    """Answers requests in the order they come; `seen` keeps them. `links` are its connections; with `gone` there are
    none, also none that was accepted just before."""

    def __init__(self, behaviour: Behaviour, owner: str = "fake") -> None:
        self.behaviour, self.owner = behaviour, owner
        self.links: set[Any] = set()  # transports
        self.gone = False
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        """The answer as pauses and bytes; an empty piece means: hang up."""
        if method == "GET":
            known = {"object": "list", "data": [{"id": "fake-model", "owned_by": self.owner}]}
            known_paths = {"/v1/models": known, "/health": {}}
            yield (
                0.0,
                whole(200, known_paths[path]) if path in known_paths else whole(404, {"error": "no route"}),
            )
            return
        ask = json.loads(body)
        number = len(self.seen)
        self.seen.append((path, ask))
        act = self.behaviour
        if number in act.refuse:
            yield 0.0, whole(429, {"error": {"message": "queue full", "code": "queue_full"}})
            return
        first = act.ttft + act.stall.get(number, 0.0)
        if not ask.get("stream") and path not in {"/generate_stream"}:
            yield first + act.itl * (output_tokens(path, ask) - 1), whole(200, self.whole_answer(path, ask))
            return
        kind = b"application/x-ndjson" if path.startswith("/api/") else b"text/event-stream"
        yield first, b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n"
        for place, event in enumerate(self.events(path, ask)):
            if number in act.cut and place == 2:
                yield 0.0, b""
                return
            yield act.itl if 0 < place < self.pauses else 0.0, chunk(event)
        yield 0.0, END

    def events(self, path: str, ask: dict[str, Any]) -> Iterator[bytes]:
        act, total = self.behaviour, output_tokens(path, ask)
        sizes = [min(act.per_chunk, total - at) for at in range(0, total, act.per_chunk)]
        self.pauses = len(sizes)
        done, text = 0, ""
        for i, size in enumerate(sizes):
            last = i == len(sizes) - 1
            piece = "" if act.eos and last else " word" * size
            done, text = done + size, text + piece
            yield from self.part(path, ask, piece, text, done, last=last)

    def part(
        self, path: str, ask: dict[str, Any], piece: str, text: str, done: int, *, last: bool
    ) -> Iterator[bytes]:
        reason, prompt = "length" if last else None, prompt_tokens(path, ask)
        if path == "/completion":
            end = {"tokens_predicted": done, "tokens_evaluated": prompt, "stop_type": "limit"} if last else {}
            yield self.sse({"content": piece, "tokens": [1] * len(piece.split()), "stop": last, **end})
        elif path == "/generate":
            meta = {"prompt_tokens": prompt, "completion_tokens": done, "cached_tokens": 0,
                    "finish_reason": {"type": "length"} if last else None}  # fmt: skip
            yield self.sse({"text": text, "meta_info": meta})
            if last:
                yield self.sse(None)
        elif path == "/generate_stream":
            words = piece.split(" ")[1:]
            for i, word in enumerate(words):
                end = last and i == len(words) - 1
                event: dict[str, Any] = {"token": {"id": 1, "text": f" {word}", "special": False}}
                if end:
                    details = {"finish_reason": "length", "generated_tokens": done, "input_length": prompt}
                    event |= {"generated_text": text, "details": details}
                yield self.sse(event)
        elif path.startswith("/api/"):
            said = {"message": {"content": piece}} if path == "/api/chat" else {"response": piece}
            yield json.dumps({**said, "done": False}).encode() + b"\n"
            if last:
                end = {
                    "done_reason": "length",
                    "prompt_eval_count": prompt,
                    "eval_count": done,
                    "eval_duration": 10**9,
                }
                yield json.dumps({"done": True, **end}).encode() + b"\n"
        else:
            part = {"delta": {"content": piece}} if "chat" in path else {"text": piece}
            choice = {"index": 0, **part, "finish_reason": reason}
            counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
            running = (ask.get("stream_options") or {}).get("continuous_usage_stats")
            yield self.sse({"choices": [choice], **({"usage": counts} if running else {})})
            if last:
                if self.behaviour.usage:
                    yield self.sse({"choices": [], "usage": counts})
                yield self.sse(None)

    def whole_answer(self, path: str, ask: dict[str, Any]) -> Any:
        total = output_tokens(path, ask)
        text, prompt = " word" * total, prompt_tokens(path, ask)
        if path == "/generate":
            return {"generated_text": text, "details": {"finish_reason": "length", "generated_tokens": total}}
        said = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        usage = {"prompt_tokens": prompt, "completion_tokens": total}
        return {"choices": [{"index": 0, **said, "finish_reason": "length"}], "usage": usage}

    def sse(self, found: Any) -> bytes:
        end = b"\r\n" if self.behaviour.crlf else b"\n"
        return b"data: " + (b"[DONE]" if found is None else json.dumps(found).encode()) + end * 2


def output_tokens(path: str, ask: dict[str, Any]) -> int:
    options = ask.get("sampling_params") or ask.get("parameters") or ask.get("options") or ask
    names = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens", "num_predict")
    return next((options[name] for name in names if name in options), 8)


def prompt_tokens(path: str, ask: dict[str, Any]) -> int:
    """One token a word, and four around a chat's messages."""
    given = ask.get("prompt") or ask.get("text") or ask.get("input_ids") or ask.get("inputs")
    if isinstance(given, list):
        return len(given)
    if given is None:
        return 4 + sum(len(str(message["content"]).split()) for message in ask["messages"])
    return len(str(given).split())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d Some\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(text),
        text,
    )


class Socket(asyncio.Protocol):
    """Serves a FakeLLM on a real connection."""

    def __init__(self, server: FakeLLM) -> None:
        self.server, self.rest = server, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.links.add(transport)
        if self.server.gone:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.links.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.rest += data
        head, found, rest = self.rest.partition(b"\r\n\r\n")
        if not found:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", 0))
        if len(rest) < length:
            return
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        self.rest = rest[length:]
        self.task = asyncio.ensure_future(self.answer(method, path, rest[:length]))

    async def answer(self, method: str, path: str, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for pause, data in self.server.respond(method, path, body):
            due += pause  # from the plan, not from the last wake-up: no drift
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            if not data:
                self.transport.close()
                return
            self.transport.write(data)


async def serve(server: FakeLLM, port: int = 0) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(lambda: Socket(server), "127.0.0.1", port)


async def main(port: int, ttft: float, itl: float) -> None:
    """python -m helpers.fake_llm PORT TTFT ITL"""
    async with await serve(FakeLLM(Behaviour(ttft=ttft, itl=itl)), port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
