"""Servers over real sockets for a router with a semantic cache: one that chats, one that gives vectors."""

from __future__ import annotations

import base64
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SIZE = 256  # numbers of a vector


def words_vector(text: str) -> list[float]:
    """How often each word is in a text: near for texts of which most words are the same."""
    vector = [0.0] * SIZE
    for word in text.lower().replace("?", "").replace(".", "").split():
        vector[zlib.crc32(word.encode()) % SIZE] += 1.0
    return vector


class Vectors:
    """Answers /v1/embeddings; `status` other than 200 is what it says instead."""

    def __init__(self) -> None:
        self.model, self.status, self.asked = "words", 200, list[str]()

    def answer(self, ask: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(ask["input"])
        packed = struct.pack(f"<{SIZE}f", *words_vector(ask["input"]))
        data = [{"index": 0, "embedding": base64.b64encode(packed).decode()}]
        return self.status, {"model": self.model, "data": data}


class Chats:
    """Answers chats with how many it has answered. `finish`, `more` and `weights` are in its answers."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.finish, self.weights = "stop", "w1"
        self.more: dict[str, Any] = {}

    def answer(self, ask: dict[str, Any]) -> tuple[int, Any]:
        self.seen.append(ask)
        about = {
            "id": f"chatcmpl-{len(self.seen)}",
            "created": 1,
            "model": "m",
            "system_fingerprint": self.weights,
        }
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        text = f"Answer {len(self.seen)}"
        if not ask.get("stream"):
            message = {"role": "assistant", "content": text, **self.more}
            choice = {"index": 0, "message": message, "finish_reason": self.finish}
            return 200, {**about, "object": "chat.completion", "choices": [choice], "usage": usage}
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {"content": text[:4]},
            {"content": text[4:]},
        ]
        events: list[Any] = [
            {**about, "choices": [{"index": 0, "delta": {**delta, **self.more}, "finish_reason": None}]}
            for delta in deltas
        ]
        events.append({**about, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
        if (ask.get("stream_options") or {}).get("include_usage"):
            events.append({**about, "choices": [], "usage": usage})
        return 200, events


@contextmanager
def answering(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """The address of a server whose POST requests are answered so: an object, or a list of events."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "m"}, {"id": "other"}]}, "application/json")

        def do_POST(self) -> None:
            status, made = answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.reply(status, made, "text/event-stream" if isinstance(made, list) else "application/json")

        def reply(self, status: int, made: Any, kind: str) -> None:
            body = json.dumps(made).encode()
            if isinstance(made, list):
                body = (
                    b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in made)
                    + b"data: [DONE]\n\n"
                )
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
