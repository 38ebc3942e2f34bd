"""A tool server for tests, over pipes (`python tool_server.py pipes MODE`) or HTTP (`HttpToolServer`)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]
TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "annotations": {"readOnlyHint": True},
        "inputSchema": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
    {"name": "erase", "description": "Erases everything.", "inputSchema": {"type": "object"}},
    {"name": "long", "inputSchema": {"type": "object"}},
    {"name": "sleep", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "die", "inputSchema": {"type": "object"}},
    {"name": "process", "inputSchema": {"type": "object"}},
]


def answer(message: Message, mode: str = "") -> Message | None:
    """The answer to a message; None to a notification."""
    method, number = message.get("method"), message.get("id")
    if number is None or method is None:
        return None
    result: Message = {}
    if method == "initialize":
        version = "1999-01-01" if mode == "old" else message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "t"}}
    elif method == "tools/list" and mode == "schemas":
        result = {"tools": [{"name": "add", "inputSchema": {"enum": [[]] * 200_000}}]}
    elif method == "tools/list":
        start = int(message["params"].get("cursor", 0))
        result = {"tools": TOOLS[start : start + 3]}
        if start + 3 < len(TOOLS):
            result["nextCursor"] = str(start + 3)
    elif method == "tools/call":
        name, given = message["params"]["name"], message["params"]["arguments"]
        if name == "add" and not isinstance(given.get("a"), int):
            return {"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "a is no integer"}}
        if name == "fail":
            content = [{"type": "text", "text": "it is broken"}]
            return {"jsonrpc": "2.0", "id": number, "result": {"content": content, "isError": True}}
        if name == "die":
            os._exit(1)
        if name == "process":
            content = [{"type": "text", "text": str(os.getpid())}]
            return {"jsonrpc": "2.0", "id": number, "result": {"content": content}}
        if name == "sleep":
            time.sleep(given["seconds"])
        text = "x" * 100_000 if name == "long" else str(given.get("a", 0) + given.get("b", 0))
        result = {
            "content": [{"type": "text", "text": text}, {"type": "image", "data": ""}],
            "isError": False,
        }
    return {"jsonrpc": "2.0", "id": number, "result": result}


def pipes(mode: str) -> None:
    """Modes: silent, noise, flood, huge, ends; else it asks the client something before each answer."""
    for line in sys.stdin:
        message = json.loads(line)
        if "method" not in message:
            continue
        if mode == "ends":
            return
        if mode == "silent":
            continue
        if mode == "noise":
            print("starting up...", flush=True)
        if mode == "huge":
            print('{"x": "' + "x" * 2**23 + '"}', flush=True)
        if mode == "flood":
            while True:
                print('{"jsonrpc": "2.0", "method": "notifications/message"}', flush=True)
        reply = answer(message, mode)
        if reply is not None:
            print('{"jsonrpc": "2.0", "id": 7, "method": "ping"}', flush=True)
            print('{"jsonrpc": "2.0", "id": 8, "method": "sampling/createMessage", "params": {}}', flush=True)
            print(json.dumps(reply), flush=True)


class HttpToolServer:
    """On a loopback port. Modes: json, events, huge, slow, refuses, deaf, forgets. `seen`: methods and headers of
    requests.
    """

    def __init__(self, mode: str) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.closed = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.seen.append((str(message.get("method")), dict(self.headers)))
                if mode == "forgets" and len(owner.seen) % 7 == 6:
                    self.send(404, "text/plain", b"no such session")
                    return
                if mode == "refuses":
                    self.send(403, "text/plain", b"no")
                    return
                reply = answer(message, mode)
                if reply is None and mode == "deaf":
                    owner.closed.wait()
                elif reply is None:
                    self.send(202, "text/plain", b"")
                elif mode == "huge":
                    self.send(200, "application/json", b"x" * 2**23)
                elif mode == "slow" and message["method"] == "tools/call":
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.end_headers()
                    for _ in range(10_000):
                        self.wfile.write(b": waiting\n\n")
                        self.wfile.flush()
                        time.sleep(0.1)
                elif mode == "events":
                    note = '{"jsonrpc": "2.0", "method": "notifications/progress"}'
                    text = f"event: message\r\ndata: {note}\r\n\r\ndata: {json.dumps(reply)}\n\n"
                    self.send(200, "text/event-stream", text.encode())
                else:
                    self.send(200, "application/json", json.dumps(reply).encode())

            def do_DELETE(self) -> None:
                owner.seen.append(("DELETE", dict(self.headers)))
                self.send(200, "text/plain", b"")

            def send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Mcp-Session-Id", "session-1")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/mcp"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


if __name__ == "__main__":
    pipes(sys.argv[2])
